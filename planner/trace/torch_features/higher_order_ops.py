"""Trace `torch.cond` and `torch.while_loop` as the Python code that they stand for; refuse others.

A condition on data is answered as that of an `if` (`data_queries/`): both branches are traced. A
loop is traced with the passes that it makes, which must not depend on data.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from shardwright.planner.trace.data_queries.errors import Unproven
from shardwright.planner.trace.data_queries.queries import DataQueries
from shardwright.planner.trace.thread_patches import Patch

MAX_PASSES = 64
"""The most passes that are traced."""


def _by_rows(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Unproven(
            f"it calls torch's {name}, which runs code row by row: write a loop in Python, or put "
            "it into a module of its own, which then stays replicated"
        )

    return refuse


def _cond(condition: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Any) -> Any:
    return yes(*operands) if condition else no(*operands)


def _while(
    condition: Callable[..., Any], body: Callable[..., Any], carried: Any, more: Any = ()
) -> Any:
    """Run the passes of a loop.

    Raises:
        Unproven: data decides how many there are, or there are more than `MAX_PASSES`.
    """
    carried = tuple(carried)
    for _ in range(MAX_PASSES):
        goes_on = condition(*carried, *more)
        if not _is_known(goes_on):
            break
        if not goes_on:
            return carried
        carried = tuple(body(*carried, *more))
    raise Unproven(
        f"torch.while_loop makes as many passes as data says, or over {MAX_PASSES}: use a Python "
        "loop over a range, or put it into a module of its own, which then stays replicated"
    )


def _is_known(condition: Any) -> bool:
    """Return whether the value of a condition does not depend on data."""
    queries = [m for m in _get_current_function_mode_stack() if isinstance(m, DataQueries)]
    is_tensor = isinstance(condition, torch.Tensor)
    return not is_tensor or any(m.value(condition) is not None for m in queries)


def _module(name: str) -> Any:
    return import_module(f"torch._higher_order_ops.{name}")


PATCHES: list[Patch] = [
    (_module("cond"), "cond_op", _cond),
    (_module("while_loop"), "while_loop_op", _while),
    (_module("scan"), "scan_op", _by_rows("scan")),
    (_module("map"), "map_impl", _by_rows("map")),
]
"""What these functions call in a trace: Python code."""
