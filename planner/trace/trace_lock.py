"""The code of one model runs at a time, and what it plans itself is planned apart from it.

While model code is traced, or tried, some of what all threads share is changed: what torch says of
exporting, the default dtype, filters of warnings and logs, random numbers, who asks for modes. So
it runs `alone`: other threads that plan wait until it is through, and solve meanwhile. All else of
a plan is its own: its copy of the model, modes and context variables, which belong to their thread.
(Ids of axes are counted for all; those of a plan grow as its axes are made, and nothing else
counts.)

Model code may plan another model, in a thread of its own, where no mode of the outer trace is on:
`apart`. (Threads that it starts itself must not plan: they would wait for it.)
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
"""Held while model code runs."""

_ours: ContextVar[bool] = ContextVar("ours", default=False)
"""Whether it is held for what runs here."""

_inside: ContextVar[bool] = ContextVar("inside", default=False)
"""Whether model code runs here."""


@contextmanager
def alone() -> Iterator[None]:
    """Within, model code may run: no other thread runs any. It may be entered again."""
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
    """Within, fake tensors do not log what model code fails at: it becomes a reason in words."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def apart(planning: Callable[P, R]) -> Callable[P, R]:
    """`planning` that model code may call, too."""

    @wraps(planning)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _inside.get():
            return planning(*args, **kwargs)

        def planned() -> R:
            _ours.set(True)  # the code that waits for this has it
            _inside.set(False)
            return planning(*args, **kwargs)

        with exporting(False), ThreadPoolExecutor(1) as thread:
            return thread.submit(planned).result()

    return call


@contextmanager
def exporting(value: bool) -> Iterator[None]:
    """Within, torch says to model code that it is being exported (there is no data), or is not."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {flag: getattr(torch.compiler, flag) for flag in flags}
    try:
        for flag in flags:
            setattr(torch.compiler, flag, value)
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)
