"""A lock: the code of only one model runs at a time. Plans made by model code run in a new thread.

Tracing and trial runs change state that all threads share: torch's export flags, the default dtype,
filters of warnings and logs, random numbers, patched functions. Model code therefore runs `alone`:
other planning threads wait for the lock before they run model code, but may solve meanwhile.
Everything else belongs to one plan: its copy of the model, and the modes and context variables of
its thread. (Ids of axes come from one counter. Only their order within a plan matters.)

Model code may plan another model. `apart` runs that plan in a thread of its own, in which no mode
of the outer trace is active. (Threads started by model code must not plan: they would deadlock.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

MODEL_CODE = Lock()
"""The lock that is held while model code runs."""

_ours: ContextVar[bool] = ContextVar("ours", default=False)
"""Whether the lock is held on behalf of the current context."""

_inside: ContextVar[bool] = ContextVar("inside", default=False)
"""Whether the current context runs model code."""


@contextmanager
def alone() -> Iterator[None]:
    """Context manager that holds the lock for running model code. It is reentrant."""
    with nullcontext() if _ours.get() else MODEL_CODE:
        ours, inside = _ours.set(True), _inside.set(True)
        try:
            with _unlogged():
                yield
        finally:
            _inside.reset(inside)
            _ours.reset(ours)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence the log of fake tensors: failures of model code are reported as reasons instead."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def apart(planning: Callable[P, R]) -> Callable[P, R]:
    """Wrap `planning` so that model code may call it too."""

    @wraps(planning)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _inside.get():
            return planning(*args, **kwargs)

        def planned() -> R:
            _ours.set(True)  # the thread that waits for this one holds the lock
            _inside.set(False)
            return planning(*args, **kwargs)

        with exporting(False), ThreadPoolExecutor(1) as thread:
            return thread.submit(planned).result()

    return call


@contextmanager
def exporting(value: bool) -> Iterator[None]:
    """Set torch's compiling and exporting flags, which tell model code that there is no data."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {flag: getattr(torch.compiler, flag) for flag in flags}
    try:
        for flag in flags:
            setattr(torch.compiler, flag, value)
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)
