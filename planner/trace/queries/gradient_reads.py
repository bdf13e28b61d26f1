"""Code that asks whether gradients are wanted: where it may hang on that, it is traced both ways.

Such a question has one answer all through a call, and is one of those that `branch_paths.py` is
about. Code may ask by `torch.is_grad_enabled()`, or by a name that it took from there when it was
imported: so the function is replaced wherever a module of Python holds it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import get_ident
from typing import Any

import torch

from shardwright.planner.trace.data_queries.branch_paths import answer_for_all
from shardwright.planner.trace.data_queries.model_code import is_plumbing, parsed
from shardwright.planner.trace.queries import autocast
from shardwright.planner.trace.queries.training_reads import harmless

QUESTIONS = {
    id(f): f.__name__
    for f in (torch.is_grad_enabled, torch.is_inference_mode_enabled, *autocast.QUESTIONS)
}
"""Functions that ask, by id, and what they are called; what is asked of autocast is noted."""

_known: dict[str, tuple[int, list[tuple[str, str]]]] = {}
"""Modules of Python that were looked through: how many names each had, and which are questions."""


@contextmanager
def asked() -> Iterator[None]:
    """Within, and in this thread, model code that asks one of `QUESTIONS` gets both answers."""
    thread = get_ident()

    def asking(question: str, before: Callable[[], bool]) -> Callable[[], bool]:
        def ask() -> bool:
            frame = sys._getframe(1)
            of_model = get_ident() == thread and not is_plumbing(frame.f_globals["__name__"])
            found = answer_for_all(question) if of_model and not harmless(frame) else None
            return before() if found is None else found

        return ask

    held = [(home, name, question, home[name]) for home, name, question in _bindings()]
    try:
        for home, name, question, before in held:
            of_autocast = "autocast" in question
            home[name] = (autocast.answering if of_autocast else asking)(question, before)
        yield
    finally:
        for home, name, _, before in held:
            home[name] = before


def _bindings() -> Iterator[tuple[dict[str, Any], str, str]]:
    """Where modules of Python hold `QUESTIONS`: their names, that of it, and the question.

    Only those that have other names than when they were last looked through are gone through anew:
    it is some hundred thousand names.
    """
    for module, home in [(n, getattr(m, "__dict__", None)) for n, m in list(sys.modules.items())]:
        if type(home) is not dict or (is_plumbing(module) and home is not vars(torch)):
            continue
        if (known := _known.get(module)) is None or known[0] != len(home):
            found = [(n, QUESTIONS[id(v)]) for n, v in list(home.items()) if id(v) in QUESTIONS]
            known = _known[module] = len(home), found
        yield from ((home, name, question) for name, question in known[1] if name in home)


@lru_cache(maxsize=1024)
def given_back(file: str, line: int) -> bool:
    """Whether what is asked on a line of a file is only set again: `x.requires_grad_(that)`."""
    functions = [f for f in ast.walk(parsed(file)) if isinstance(f, ast.FunctionDef)]
    around = [f for f in functions if f.lineno <= line <= (f.end_lineno or 0)]
    if not around:
        return False
    nodes = list(ast.walk(max(around, key=lambda f: f.lineno)))
    again: set[int] = set()
    asked = [n for n in nodes if isinstance(n, ast.Assign) and n.lineno == line]
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="requires_grad_"), args=[ast.Name() as name]):
                again.add(id(name))
    match asked:
        case [ast.Assign([ast.Name(id=of) as name], ast.Attribute(attr="requires_grad"))]:
            uses = (n for n in nodes if isinstance(n, ast.Name) and n.id == of)
            return all(n is name or id(n) in again for n in uses)
    return False
