"""What is read goes to a GPU through pinned memory: one piece is read while another is copied.

From other memory the driver copies through pinned memory of its own, and whoever reads waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

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
