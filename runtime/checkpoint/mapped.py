"""Pieces of a mapped file as tensors: what is written to these stays in memory.

What a rank holds of a fused weight is several pieces of a file, and one tensor. Where these lie as
they should lie in memory, to the byte within a page, their pages are mapped one behind the other;
the bytes at their ends, and pieces that lie otherwise, are read straight to their place.
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
"""Where it begins, and how much it is, in elements of a tensor or bytes of a file."""

LEAST = 1 << 18
"""Bytes of each of several pieces that are worth a mapping of their own."""
MOST = 64
"""Pieces of one tensor: a process may have some 65,000 mappings."""

_FIXED = 0x10  # MAP_FIXED of Linux, on all processors that torch runs on


def pieces(ranges: Sequence[Sequence[Range]], shape: Sequence[int], itemsize: int) -> list[Piece]:
    """The pieces of a stored tensor that a rank holds, in their order; none if they are too many.

    Args:
        ranges: per dimension, the ascending ranges of indices that the rank holds.
        shape: of the whole tensor.
        itemsize: bytes of an element.
    """
    if not ranges:
        return []
    split = [d for d, held in enumerate(ranges) if [*held] != [(0, shape[d])]]
    last = max(split, default=0)
    each = prod(shape[last + 1 :])
    count = prod(sum(b - a for a, b in held) for held in ranges[:last]) * len(ranges[last])
    smallest = min((b - a for a, b in ranges[last]), default=0) * each * itemsize
    if not smallest or (count > 1 and (count > MOST or smallest < LEAST or not can_map())):
        return []
    rows = [0]
    for size, held in zip(shape, ranges[:last], strict=False):
        rows = [row * size + i for row in rows for a, b in held for i in range(a, b)]
    return [
        ((row * shape[last] + a) * each, (b - a) * each) for row in rows for a, b in ranges[last]
    ]


class StoredFile:
    """A safetensors file that is open: it stays the same where another is put in its place.

    Tensors of it may outlive it.

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
        """Bytes that it had when it was opened."""
        return self._about.st_size

    def is_changed(self) -> bool:
        """Whether somebody wrote into it, or cut it off, since it was opened."""
        now = os.fstat(self._file)
        was = self._about
        return (now.st_size, now.st_mtime_ns) != (was.st_size, was.st_mtime_ns)

    def is_in_place(self) -> bool:
        """Whether its name still leads to it."""
        try:
            return os.path.samestat(self.path.stat(), self._about)
        except OSError:
            return False

    def bytes_at(self, start: int, count: int) -> bytes:
        """Bytes of the file; fewer where it ends before.

        Raises:
            OSError: they cannot be read.
        """
        out = bytearray()
        while got := os.pread(self._file, count - len(out), start + len(out)):
            out += got
        return bytes(out)

    def release(self) -> None:
        """Unmap what no tensor lies in."""
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
        """Where the bytes of tensors begin."""
        return 8 + int.from_bytes(self.bytes_at(0, 8), "little")

    def read(self, start: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """The bytes from `start` of its data on, as a flat tensor; maybe at an odd address.

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
        """The bytes at `where` of its data, one piece behind the other, as a flat tensor.

        None where the file has them at odd addresses.

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
    """All of an open file."""
    if not can_map():
        return mmap(file, 0, access=ACCESS_COPY)
    size = os.fstat(file).st_size
    memory = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)  # of the file itself it keeps a descriptor
    _map(_address(memory), size, file, 0)
    return memory


def _joined(file: int, where: Sequence[Piece], dtype: torch.dtype) -> Tensor:
    shift = where[0][0] % PAGESIZE
    total = sum(length for _, length in where)
    memory = mmap(-1, shift + total, MAP_PRIVATE | MAP_ANONYMOUS)  # unmapped with the tensor
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
    """Whether this system maps files as is done here."""
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
    """Put pages of a file in the place of memory that `address` has."""
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
