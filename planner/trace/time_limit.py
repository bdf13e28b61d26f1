"""Ends the trace of a model when the time for planning is up.

A loop over hundreds of experts, say, takes minutes. What runs then is code of the model, which may
catch exceptions, so the one that ends it is not an `Exception`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shardwright.errors import SolverError
from shardwright.runtime.scopes import holding

_until: ContextVar[float] = ContextVar("until", default=math.inf)


class _TimeIsUp(BaseException):
    """The time for planning is up."""


@contextmanager
def traced_until(end: float) -> Iterator[None]:
    """Context manager in which traces end at `end`, in the time of `time.monotonic`.

    Raises:
        SolverError: a trace took longer.
    """
    try:
        with holding(_until, end):
            yield
    except _TimeIsUp:
        raise SolverError(
            "no plan within the time limit: the model was still being traced; raise --time-limit"
        ) from None


def check_time() -> None:
    """End the trace if the time is up."""
    if time.monotonic() > _until.get():
        raise _TimeIsUp
