"""Functions of TorchScript run as the Python code that they were compiled from.

What compiled code does with sizes is not seen, and its calls are not those of model code. There is
none of its own where a function was recorded or read from a file: then the module that calls it
depends on what is not known, and stands for itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from shardwright.planner.trace.data_queries.errors import NeedsData

Compiled: Any = torch.jit.ScriptFunction


@contextmanager
def as_python() -> Iterator[None]:
    """Within, and in this thread, calls of compiled functions are calls of Python code."""
    before, thread = Compiled.__call__, get_ident()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:  # on data, made-up or real
            return before(self, *args, **kwargs)
        return _code(self)(*args, **kwargs)

    Compiled.__call__ = call
    try:
        yield
    finally:
        Compiled.__call__ = before


def _code(compiled: Any) -> Callable[..., Any]:
    """What a function was compiled from.

    Raises:
        NeedsData: it was recorded or read, or does otherwise where it is compiled.
    """
    found = vars(compiled).get("_torchdynamo_inline")
    written = inspect.isfunction(found) and "__name__" in vars(compiled)  # else it was recorded
    if not written or "is_scripting" in found.__code__.co_names:
        raise NeedsData("it calls TorchScript that is not the same as Python code")
    return found
