"""Maps pieces of a file as tensors; writes to these tensors stay in memory.

A rank's part of a fused weight is several pieces of a file, but must be one tensor. Where a piece
has the same offset within a page in the file as in memory, its full pages are mapped, one piece
behind the other. The bytes at its two ends, and pieces with other offsets, are read into place.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Sequence
from functools import cache, cached_property
from math import prod
from mmap import ACCESS_COPY, MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, PROT_READ, PROT_WRITE, mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.planner.contract.dims import Range

Piece = tuple[int, int]
"""(start, length), in elements of a tensor or bytes of a file."""

MIN_PIECE_BYTES = 1 << 18
"""Least bytes of each of several pieces for which a separate mapping is worth it."""
MAX_PIECES = 64
"""Most pieces of one tensor: a process may have some 65,000 mappings."""

_FIXED = 0x10  # MAP_FIXED on Linux, on all processors that torch runs on


def pieces(ranges: Sequence[Sequence[Range]], shape: Sequence[int], itemsize: int) -> list[Piece]:
    """Return the pieces of a stored tensor that a rank holds, in order; none if not to be mapped.

    Args:
        ranges: per dimension, the ascending ranges of indices that the rank holds.
        shape: shape of the full tensor.
        itemsize: bytes of an element.
    """
    if not ranges:
        return []
    split = [d for d, held in enumerate(ranges) if [*held] != [(0, shape[d])]]
    last = max(split, default=0)
    each = prod(shape[last + 1 :])
    count = prod(sum(b - a for a, b in held) for held in ranges[:last]) * len(ranges[last])
    smallest = min((b - a for a, b in ranges[last]), default=0) * each * itemsize
    if not smallest or (
        count > 1 and (count > MAX_PIECES or smallest < MIN_PIECE_BYTES or not can_map())
    ):
        return []
    rows = [0]
    for size, held in zip(shape, ranges[:last], strict=False):
        rows = [row * size + i for row in rows for a, b in held for i in range(a, b)]
    return [
        ((row * shape[last] + a) * each, (b - a) * each) for row in rows for a, b in ranges[last]
    ]


class StoredFile:
    """An open safetensors file. It stays the same if another file replaces it on disk.

    Tensors read from it may outlive it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._file)
        self._about = os.fstat(self._file)
        self._mapped: mmap | None = None

    @property
    def size(self) -> int:
        """Return the size in bytes when the file was opened."""
        return self._about.st_size

    def is_changed(self) -> bool:
        """Return whether the file was written to or truncated since it was opened."""
        now = os.fstat(self._file)
        was = self._about
        return (now.st_size, now.st_mtime_ns) != (was.st_size, was.st_mtime_ns)

    def is_in_place(self) -> bool:
        """Return whether its path still leads to this file."""
        try:
            return os.path.samestat(self.path.stat(), self._about)
        except OSError:
            return False

    def bytes_at(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start` on, or fewer at the end of the file.

        Raises:
            OSError: the file cannot be read.
        """
        out = os.pread(self._file, count, start)
        while len(out) < count and (
            got := os.pread(self._file, count - len(out), start + len(out))
        ):
            out += got
        return out

    def release(self) -> None:
        """Drop the mapping; tensors that lie in it keep it alive."""
        self._mapped = None

    @property
    def _memory(self) -> mmap:
        if self._mapped is None:
            if sys.byteorder != "little":
                raise OSError("its numbers are little-endian, those of this machine are not")
            if os.fstat(self._file).st_size < self.size:
                raise OSError("the file is truncated")
            try:
                self._mapped = _mapped(self._file)
            except ValueError as error:
                raise OSError(str(error)) from None
        return self._mapped

    @cached_property
    def data(self) -> int:
        """Return where the data section begins."""
        return 8 + int.from_bytes(self.bytes_at(0, 8), "little")

    def read(self, start: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Return bytes of the data section as a flat tensor, possibly at an unaligned address.

        Raises:
            OSError: the file is shorter.
        """
        start += self.data
        if start + nbytes > len(self._memory):
            raise OSError("the file is truncated")
        count = nbytes // dtype.itemsize
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)

    def joined(self, where: Sequence[Piece], dtype: torch.dtype) -> Tensor | None:
        """Return the pieces `where` of the data section, concatenated, as one flat tensor.

        Returns None if the first piece is not aligned to the dtype's size in the file.

        Raises:
            OSError: the file is shorter, or cannot be mapped.
        """
        if (self.data + where[0][0]) % dtype.itemsize:
            return None
        if len(where) == 1:
            return self.read(*where[0], dtype)
        if any(self.data + start + length > len(self._memory) for start, length in where):
            raise OSError("the file is truncated")
        moved = [(self.data + start, length) for start, length in where]
        return _joined(self._file, moved, dtype)


def _mapped(file: int) -> mmap:
    """Map an open file in full."""
    if not can_map():
        return mmap(file, 0, access=ACCESS_COPY)
    size = os.fstat(file).st_size
    memory = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)  # mmap of a file keeps a descriptor open
    _map(_address(memory), size, file, 0)
    return memory


def _joined(file: int, where: Sequence[Piece], dtype: torch.dtype) -> Tensor:
    shift = where[0][0] % PAGESIZE
    total = sum(length for _, length in where)
    memory = mmap(-1, shift + total, MAP_PRIVATE | MAP_ANONYMOUS)  # freed with the tensor
    begin, view, at = _address(memory), memoryview(memory), shift
    for start, length in where:
        low, high = -(-at // PAGESIZE) * PAGESIZE, (at + length) // PAGESIZE * PAGESIZE
        if (start - at) % PAGESIZE or low >= high:
            low = high = at + length
        else:
            _map(begin + low, high - low, file, start + low - at)
        _read(file, view[at:low], start)
        _read(file, view[high : at + length], start + high - at)
        at += length
    return torch.frombuffer(memory, dtype=dtype, count=total // dtype.itemsize, offset=shift)


@cache
def can_map() -> bool:
    """Return whether this system supports the mappings made here (64-bit Linux)."""
    return sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    of_size = [ctypes.c_void_p, ctypes.c_size_t]
    library.mmap.argtypes = [*of_size, *[ctypes.c_int] * 3, ctypes.c_int64]
    return library


def _address(memory: mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _map(address: int, length: int, file: int, start: int) -> None:
    """Map `length` bytes of a file from `start` on over the memory at `address`."""
    access = PROT_READ | PROT_WRITE
    got = _library().mmap(address, length, access, MAP_PRIVATE | _FIXED, file, start)
    if got != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _read(file: int, view: memoryview, start: int) -> None:
    while view:
        got = os.preadv(file, [view], start)
        if not got:
            raise OSError("the file is truncated")
        view, start = view[got:], start + got
