"""Code that asks whether gradients are wanted: where it may hang on that, it is traced both ways.

Such a question has one answer all through a call, and is one of those that `branch_paths.py` is
about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident

import torch

from shardwright.planner.trace.data_dependent.branch_paths import answer_for_all
from shardwright.planner.trace.data_dependent.model_code import is_plumbing
from shardwright.planner.trace.training_reads import harmless

QUESTIONS = ("is_grad_enabled", "is_inference_mode_enabled")
"""Functions of torch."""


@contextmanager
def asked() -> Iterator[None]:
    """Within, and in this thread, model code that asks one of `QUESTIONS` gets both answers."""
    before, thread = {name: getattr(torch, name) for name in QUESTIONS}, get_ident()

    def asking(name: str) -> Callable[[], bool]:
        def ask() -> bool:
            frame = sys._getframe(1)
            of_model = get_ident() == thread and not is_plumbing(frame.f_globals["__name__"])
            found = answer_for_all(name) if of_model and not harmless(frame) else None
            return before[name]() if found is None else found

        return ask

    try:
        for name in QUESTIONS:
            setattr(torch, name, asking(name))
        yield
    finally:
        for name, function in before.items():
            setattr(torch, name, function)
