"""Random numbers that code draws with Python or NumPy: ranks draw other ones.

Code may draw them if it does the same whatever they are, as a layer drop of 0 does. A graph has the
numbers that are arguments of ops. Of tensors that are made of numbers it has no values, so these
are noted here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from shardwright.planner.trace.thread_patches import Patch, patched_in_this_thread

REFUSED = "it draws random numbers with Python or NumPy: draw them with torch"

BOUNDS = (0.0, 1 - 2**-53)
"""The least and the largest number in [0, 1): thresholds are between them."""

_NOTED: ContextVar[list[Any] | None] = ContextVar("noted", default=None)


@contextmanager
def noting_data() -> Iterator[list[Any]]:
    """Context manager that yields a list of what tensors are made of within it, as plain data."""
    noted: list[Any] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def note_data(data: Any) -> None:
    """Note what code makes a tensor of: numbers, or an array, which may be large, by its hash."""
    if (noted := _NOTED.get()) is not None:
        as_bytes = getattr(data, "tobytes", None)
        noted.append(repr(data) if as_bytes is None else (data.shape, hash(as_bytes())))


def states() -> tuple[Any, ...]:
    """Return the states of the random generators of Python and NumPy."""
    numpy: Any = sys.modules.get("numpy")
    kind, keys, *rest = numpy.random.get_state() if numpy else (None, b"")
    return random.getstate(), kind, bytes(keys), *rest


def other_draws() -> Iterator[AbstractContextManager[None]]:
    """Yield contexts in which code of this thread draws other numbers: both bounds, and any."""
    for bound in BOUNDS:
        yield patched_in_this_thread([*_drawing(bound)])
    yield nullcontext()


def _drawing(bound: float) -> Iterator[Patch]:
    """Yield what makes each number drawn from [0, 1) this one, and others the first or last."""

    def end(values: Any) -> Any:
        return values[-1 if bound else 0]

    yield random, "random", lambda: bound
    yield random, "uniform", lambda a, b: a + (b - a) * bound
    yield random, "randint", lambda a, b: end((a, b))
    yield random, "randrange", lambda *given: end(range(*given))
    yield random, "choice", end
    if (numpy := sys.modules.get("numpy")) is None:
        return

    def filled(size: int | Sequence[int] | None = None) -> Any:
        return bound if size is None else numpy.full(size, bound)

    def uniform(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return low + (high - low) * filled(size)

    yield numpy.random, "random", filled
    yield numpy.random, "random_sample", filled
    yield numpy.random, "rand", lambda *sizes: filled(sizes or None)
    yield numpy.random, "uniform", uniform
