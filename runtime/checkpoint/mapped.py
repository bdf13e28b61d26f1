"""Pieces of a file as one tensor in memory: whole pages of them are the mapped file itself.

What a rank holds of a fused weight is several pieces of a file. Where these lie as they should lie
in memory, to the byte within a page, their pages are mapped one behind the other; the bytes at
their ends, and pieces that lie otherwise, are read straight to their place.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from functools import cache
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, PROT_READ, PROT_WRITE, mmap
from typing import Any

import torch
from torch import Tensor

from shardwright.planner.contract.dims import Range

Piece = tuple[int, int]
"""Where it begins, and how much it is, in elements of a tensor or bytes of a file."""

LEAST = 1 << 18
"""Bytes of a piece that is worth a mapping of its own."""
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
    if not (can_map() and ranges):
        return []
    split = [d for d, held in enumerate(ranges) if [*held] != [(0, shape[d])]]
    last = max(split, default=0)
    each = prod(shape[last + 1 :])
    before = prod(sum(b - a for a, b in held) for held in ranges[:last])
    smallest = min((b - a for a, b in ranges[last]), default=0)
    if before * len(ranges[last]) > MOST or smallest * each * itemsize < LEAST:
        return []
    rows = [0]
    for size, held in zip(shape, ranges[:last], strict=False):
        rows = [row * size + i for row in rows for a, b in held for i in range(a, b)]
    return [
        ((row * shape[last] + a) * each, (b - a) * each) for row in rows for a, b in ranges[last]
    ]


def joined(file: int, where: Sequence[Piece], dtype: torch.dtype) -> Tensor | None:
    """The bytes of an open file at `where`, one piece behind the other, as a flat tensor.

    What is written to it stays in memory. None where the file has them at odd addresses.

    Raises:
        OSError: the file is shorter, or cannot be mapped.
    """
    shift = where[0][0] % PAGESIZE
    if shift % dtype.itemsize:
        return None
    size = os.fstat(file).st_size
    if any(start + length > size for start, length in where):
        raise OSError("the file is truncated")
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
