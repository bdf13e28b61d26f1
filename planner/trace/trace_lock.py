"""A lock: the code of only one model runs at a time, and it must not plan models itself.

Tracing and trial runs change state that all threads share: torch's export flags, the default dtype,
filters of warnings and logs, random numbers, patched functions. Model code therefore runs `alone`:
other planning threads wait for the lock before they run model code, but may solve meanwhile.
Everything else belongs to one plan: its copy of the model, and the modes and context variables of
its thread. (Ids of axes come from one counter. Only their order within a plan matters.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import ParamSpec, TypeVar

import torch

from shardwright.errors import UsageError
from shardwright.runtime.scopes import holding, replaced

P = ParamSpec("P")
R = TypeVar("R")

MODEL_CODE = Lock()
"""The lock that is held while model code runs."""

_inside: ContextVar[bool] = ContextVar("inside", default=False)
"""Whether the current context runs model code, and so holds the lock."""


@contextmanager
def alone() -> Iterator[None]:
    """Context manager that holds the lock for running model code. It is reentrant."""
    # Failures of model code are reported as reasons instead.
    silent = replaced(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True)
    with nullcontext() if _inside.get() else MODEL_CODE, holding(_inside, True), silent:
        yield


def not_in_model_code(planning: Callable[P, R]) -> Callable[P, R]:
    """Wrap `planning` so that it refuses to run in the code of a model that is being traced.

    (Threads started by model code must not plan either: they would deadlock.)
    """

    @wraps(planning)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _inside.get():
            raise UsageError(
                "the code of a model that is being planned plans a model itself: make that plan "
                "before, and give it to the code"
            )
        return planning(*args, **kwargs)

    return call


@contextmanager
def exporting(value: bool) -> Iterator[None]:
    """Set torch's compiling and exporting flags, which tell model code that there is no data."""
    with replaced(torch.compiler, _is_compiling_flag=value, _is_exporting_flag=value):
        yield
