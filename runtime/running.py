"""Whether a forward pass of a split model runs at present, in this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Running(threading.local):
    """Shared by the modules of one split model: whether a forward of it, or in it, runs."""

    now = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        return memo.setdefault(id(self), Running())

    def __reduce__(self) -> Any:
        return Running, ()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward: what is called within is called by it."""
        outer, self.now = self.now, True
        try:
            yield
        finally:
            self.now = outer
