"""Where the time of planning goes, for those who measure it: a plan itself holds no timings.

with watch() as stages:
    plan(model, tp=8)
stages.seconds  # {"read": 0.1, "trace": 1.2, "axes": 0.1, ...}
stages.figures  # {"variables": 1300, ...}

What other threads plan meanwhile is not measured, nor what model code plans while it is traced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Stages:
    """Seconds by stage, all of a stage's turns together, and the last figures that were noted."""

    clock: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)
    _running: str | None = None
    _since: float = 0.0

    def begin(self, name: str | None) -> None:
        """End the stage that runs; what follows belongs to `name`."""
        now = self.clock()
        if self._running is not None:
            self.seconds[self._running] = self.seconds.get(self._running, 0.0) + now - self._since
        self._running, self._since = name, now


_watched: ContextVar[Stages | None] = ContextVar("stages", default=None)


@contextmanager
def watch(clock: Callable[[], float] = time.perf_counter) -> Iterator[Stages]:
    """Measure the planning that is done inside, by a clock that gives seconds."""
    stages = Stages(clock)
    token = _watched.set(stages)
    try:
        yield stages
    finally:
        stages.begin(None)
        _watched.reset(token)


def stage(name: str) -> None:
    """Say that what follows, until the next stage begins, is `name`."""
    if (stages := _watched.get()) is not None:
        stages.begin(name)


def figures(**numbers: int) -> None:
    """Note how large something is."""
    if (stages := _watched.get()) is not None:
        stages.figures.update(numbers)
