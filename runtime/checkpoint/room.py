"""Memory for what is read: on the CPU in large pages, where the system gives such.

The first write to each page of 4 KiB costs the kernel more than copying it does. Large ones are
asked for by block, since most weights of a small model are shorter than one of these.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

BLOCK = 32 << 20
"""Bytes that are asked for at a time; what is not used of them takes no memory."""

LEAST = 1 << 16
"""Bytes of a tensor that gets its memory here."""

ALIGNED = 64
"""Bytes of which each tensor begins at a multiple, as torch's own."""


class Room:
    """Gives tensors without values on one device.

    Those that lie in one block keep all of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._block: mmap.mmap | None = None
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor."""
        count = prod(shape)
        size = count * dtype.itemsize
        if self.device.type != "cpu" or size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype, device=self.device)
        start = -(-self._used // ALIGNED) * ALIGNED
        if self._block is None or start + size > len(self._block):
            self.trim()
            start, self._block = 0, _block(max(size, BLOCK))
        self._used = start + size
        return torch.frombuffer(self._block, dtype=dtype, count=count, offset=start).view(shape)

    def trim(self) -> None:
        """Give back the end of a large page that no tensor has: all that were taken are filled."""
        if self._block is not None:
            end = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
            if end < len(self._block):
                self._block.madvise(mmap.MADV_DONTNEED, end)


def _block(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
