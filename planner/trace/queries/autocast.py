"""Autocasting by the device of a tensor, where that is meta: there torch knows of none.

What is cast says nothing about how it is split. Code that asks whether it is on may do more than
cast; that is noted, and it may be answered as if it were, with the dtype that all has as it is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.planner.trace.data_queries.model_code import is_plumbing

QUESTIONS = (
    *(torch.is_autocast_enabled, torch.is_autocast_cpu_enabled, torch.get_autocast_dtype),
    *(torch.get_autocast_gpu_dtype, torch.get_autocast_cpu_dtype),
)
"""Functions that ask."""

MAKES_CONTEXTS = "transformers.utils."
"""Where code asks only whether there is need for a context that turns it off."""


class Asked(threading.local):
    """What code that this thread traces asks, and what it is told."""

    asked = False
    on: torch.dtype | None = None


_now = Asked()


@contextmanager
def noted(on: torch.dtype | None = None) -> Iterator[Asked]:
    """Within, it is noted whether model code asks; with a dtype it is told that it is `on`."""
    before = _now.on
    _now.asked, _now.on = False, on
    try:
        yield _now
    finally:
        _now.on = before


def answering(question: str, before: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for one of `QUESTIONS`."""

    def answer(*args: Any) -> Any:
        asks = sys._getframe(1).f_globals["__name__"]
        if not (is_plumbing(asks) or asks.startswith(MAKES_CONTEXTS)):
            _now.asked = True
            if _now.on is not None:
                return True if question.endswith("enabled") else _now.on
        return before(*("cpu" if one == "meta" else one for one in args))

    return answer


@contextmanager
def known_on_meta() -> Iterator[None]:
    """Within, `torch.autocast("meta")` casts nothing, and does not raise."""
    before = torch.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        before(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = init
    try:
        yield
    finally:
        torch.autocast.__init__ = before
