"""Memory for loaded tensors: huge pages on the CPU, pinned staging buffers for a GPU.

The first write to each page of 4 KiB costs the kernel more than the copy itself. `Room` therefore
asks for huge pages, block by block, since most weights of a small model are shorter than one.

From unpinned memory the driver copies through pinned memory of its own, and the reader waits.
`Staging` therefore reads one piece while another is being copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from math import prod
from typing import Any

import torch
from torch import Tensor

BLOCK = 32 << 20
"""Bytes allocated at a time; unused bytes take no memory."""

MIN_BYTES = 1 << 16
"""Least bytes of a tensor that gets its memory from a block."""

ALIGNED = 64
"""Each tensor begins at a multiple of this many bytes, as torch's own do."""


class Room:
    """Allocates uninitialised tensors on one device.

    A tensor keeps the block that it lies in alive.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._block: mmap.mmap | None = None
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor."""
        count = prod(shape)
        size = count * dtype.itemsize
        if self.device.type != "cpu" or size < MIN_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype, device=self.device)
        start = -(-self._used // ALIGNED) * ALIGNED
        if self._block is None or start + size > len(self._block):
            self.trim()
            start, self._block = 0, _block(max(size, BLOCK))
        self._used = start + size
        return torch.frombuffer(self._block, dtype=dtype, count=count, offset=start).view(shape)

    def trim(self) -> None:
        """Release the unused end of the block. Call it when all taken tensors are filled."""
        if self._block is not None:
            end = -(-self._used // mmap.PAGESIZE) * mmap.PAGESIZE
            if end < len(self._block):
                self._block.madvise(mmap.MADV_DONTNEED, end)


def _block(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def release_freed() -> None:
    """Return freed memory to the system, where the C library is glibc.

    It finds no room for an aligned tensor where one of the same size was freed, so that the heap
    grows with each (https://sourceware.org/bugzilla/show_bug.cgi?id=14581).
    """
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


ROOM = 16 << 20
"""Bytes of one pinned buffer: a box of a read is at most half of it, or a single element."""

PIECES = 2


class Staging:
    """Copies tensors from the host to one device, through pinned buffers if it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._pieces = [] if device.type != "cuda" else _pieces()
        self._turns: Iterator[tuple[Tensor, Any]] = cycle(self._pieces)

    def copy(self, to: Tensor, read: Tensor) -> None:
        """Copy `read`, a host tensor, to `to`. On a GPU the copy is only complete after `wait`."""
        size = read.numel() * to.element_size()
        if not self._pieces or _on_host(to) or size > ROOM:
            to.copy_(read)
            return
        memory, copied = next(self._turns)
        copied.synchronize()  # wait for the copy that last used this buffer
        pinned = memory[:size].view(to.dtype).view(read.shape)
        pinned.copy_(read)  # casts here: a cast in the copy to the GPU would take unpinned memory
        to.copy_(pinned, non_blocking=True)
        copied.record()

    def wait(self) -> None:
        """Wait until all copies are complete; the pinned buffers may then be freed."""
        for _, copied in self._pieces:
            copied.synchronize()


def _on_host(to: Tensor) -> bool:
    return to.is_cpu


def _pieces() -> list[tuple[Tensor, Any]]:
    """Return pinned buffers, each with an event; none if the system cannot pin memory."""
    try:
        return [(_pinned(ROOM), torch.cuda.Event()) for _ in range(PIECES)]
    except RuntimeError:
        return []


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
