"""Run compiled functions as the Python code that they were compiled from.

Code compiled by TorchScript hides what it does with sizes, and its calls do not count as calls of
model code. What `torch.compile` made runs eagerly, as its results are the same. A TorchScript
function that was traced or loaded from a file has no Python code: the module that calls it then
becomes one op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from shardwright.planner.trace.data_queries.errors import NeedsData
from shardwright.planner.trace.thread_patches import Patch


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


def _call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
    return _code(compiled)(*args, **kwargs)


PATCHES: list[Patch] = [(torch.jit.ScriptFunction, "__call__", _call)]
"""Compiled functions are called as Python code in a trace."""
