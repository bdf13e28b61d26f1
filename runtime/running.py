"""Whether a forward pass of a split model runs at present, in this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Running(threading.local):
    """Shared by the modules of one split model: whether a forward of it, or in it, runs.

    What is called while `now` is set is called by that forward. Who sets it sets it back, in its
    own frame: this is asked and done for each module of each step.
    """

    now = False
    shown: tuple[Any, ...] = ()
    """What hooks were shown in this forward in the place of what the model goes on with."""
    left = False
    """Whether code that is no part of the model runs within its forward: a hook."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        return memo.setdefault(id(self), Running())

    def __reduce__(self) -> Any:
        return Running, ()


class Always:
    """In its place for a layer that was made by itself: it takes local tensors, whoever calls."""

    now = True
    left = False


ALWAYS = Always()


@contextmanager
def left(running: Running | Always) -> Iterator[None]:
    """Within, whoever calls modules of the model, or reads their parameters, is not the model."""
    if isinstance(running, Always):
        yield
        return
    outer = running.now, running.left, running.shown
    running.now, running.left, running.shown = False, True, ()
    try:
        yield
    finally:
        running.now, running.left, running.shown = outer
