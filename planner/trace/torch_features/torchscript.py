"""Run compiled functions as the Python code that they were compiled from.

Code compiled by TorchScript hides what it does with sizes, and its calls do not count as calls of
model code. What `torch.compile` made runs eagerly, as its results are the same. A TorchScript
function that was traced or loaded from a file has no Python code: the module that calls it then
becomes one op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.planner.trace.data_queries.errors import NeedsData
from shardwright.planner.trace.thread_patches import patched_in_this_thread

Compiled: Any = torch.jit.ScriptFunction


@contextmanager
def as_python() -> Iterator[None]:
    """Context manager in which this thread calls compiled functions as Python code.

    Other threads run on made-up or real data.
    """
    call = lambda compiled, *args, **kwargs: _code(compiled)(*args, **kwargs)  # noqa: E731
    with (
        patched_in_this_thread([(Compiled, "__call__", call)]),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _code(compiled: Any) -> Callable[..., Any]:
    """Return the Python function that a function was compiled from.

    Raises:
        NeedsData: the function was traced or loaded, or checks whether it is compiled.
    """
    found = vars(compiled).get("_torchdynamo_inline")
    written = inspect.isfunction(found) and "__name__" in vars(compiled)  # else it was traced
    if not written or "is_scripting" in found.__code__.co_names:
        raise NeedsData("it calls TorchScript that is not the same as Python code")
    return found
