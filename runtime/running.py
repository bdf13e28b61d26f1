"""Whether a forward pass of a split model runs at present, in this thread."""

from __future__ import annotations

import threading
from typing import Any


class Running(threading.local):
    """Shared by the modules of one split model: whether a forward of it, or in it, runs.

    What is called while `now` is set is called by that forward. Who sets it sets it back, in its
    own frame: this is asked and done for each module of each step.
    """

    now = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        return memo.setdefault(id(self), Running())

    def __reduce__(self) -> Any:
        return Running, ()


class Always:
    """In its place for a layer that was made by itself: it takes local tensors, whoever calls."""

    now = True


ALWAYS = Always()
