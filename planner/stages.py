"""Measures the seconds of each stage of planning. A plan itself holds no timings.

with watch() as stages:
    plan(model, tp=8)
stages.seconds  # {"read": 0.1, "trace": 1.2, "axes": 0.1, ...}
stages.figures  # {"variables": 1300, ...}

Plans in other threads, and plans that model code makes while it is traced, are not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Stages:
    """Total seconds of each stage, and the last value of each figure.

    `told` is called with the name of each stage when it begins.
    """

    clock: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)
    told: Callable[[str], None] = lambda name: None
    _running: str | None = None
    _since: float = 0.0

    def begin(self, name: str | None) -> None:
        """End the current stage, and begin the stage `name`."""
        now = self.clock()
        if self._running is not None:
            self.seconds[self._running] = self.seconds.get(self._running, 0.0) + now - self._since
        self._running, self._since = name, now
        if name is not None:
            self.told(name)


_watched: ContextVar[Stages | None] = ContextVar("stages", default=None)


@contextmanager
def watch(
    clock: Callable[[], float] = time.perf_counter, told: Callable[[str], None] = lambda name: None
) -> Iterator[Stages]:
    """Measure the planning within the context, by a clock in seconds."""
    stages = Stages(clock, told=told)
    token = _watched.set(stages)
    try:
        yield stages
    finally:
        stages.begin(None)
        _watched.reset(token)


def stage(name: str) -> None:
    """Begin the stage `name`, which lasts until the next stage begins."""
    if (stages := _watched.get()) is not None:
        stages.begin(name)


def figures(**numbers: int) -> None:
    """Record figures, such as the number of variables."""
    if (stages := _watched.get()) is not None:
        stages.figures.update(numbers)
