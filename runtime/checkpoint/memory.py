"""Memory for what is read: large pages on the CPU, pinned memory on the way to a GPU.

The first write to each page of 4 KiB costs the kernel more than copying it does. So `Room` asks for
large pages, by block, since most weights of a small model are shorter than one of these.

From other memory than pinned one the driver copies through pinned memory of its own, and whoever
reads waits. So `Staging` reads one piece while another is copied.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from math import prod
from typing import Any

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


ROOM = 16 << 20
"""Bytes of one piece of pinned memory: a box that is read has half of them, or one element."""

PIECES = 2


class Staging:
    """Copies from the host to one device; to a CPU as tensors do."""

    def __init__(self, device: torch.device) -> None:
        self._pieces = [] if device.type != "cuda" else _pieces()
        self._turns: Iterator[tuple[Tensor, Any]] = cycle(self._pieces)

    def copy(self, to: Tensor, read: Tensor) -> None:
        """Have `to` become `read`, which lies on the host; on a GPU at the latest by `wait`."""
        size = read.numel() * to.element_size()
        if not self._pieces or _on_host(to) or size > ROOM:
            to.copy_(read)
            return
        memory, copied = next(self._turns)
        copied.synchronize()  # what was in this piece before
        pinned = memory[:size].view(to.dtype).view(read.shape)
        pinned.copy_(read)  # casts, too: the copy to a GPU would do that in memory of its own
        to.copy_(pinned, non_blocking=True)
        copied.record()

    def wait(self) -> None:
        """Until all is copied: pinned memory may go."""
        for _, copied in self._pieces:
            copied.synchronize()


def _on_host(to: Tensor) -> bool:
    return to.is_cpu


def _pieces() -> list[tuple[Tensor, Any]]:
    """Pinned memory, and an event for each; none where the system gives no such memory."""
    try:
        return [(_pinned(ROOM), torch.cuda.Event()) for _ in range(PIECES)]
    except RuntimeError:
        return []


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
