"""Tensors in arguments and results of ops. Only lists, tuples and dicts: faster than pytrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in arguments or results, in order. This runs for every op."""
    out: list[Tensor] = []
    _add_tensors((value,), out)
    return out


def _add_tensors(values: Iterable[Any], out: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            out.append(value)
        elif isinstance(value, (tuple, list)):
            _add_tensors(value, out)
        elif isinstance(value, dict):
            _add_tensors(value.values(), out)


def mapped(change: Callable[[Any], Any], value: Any, kinds: Any = Tensor) -> Any:
    """Return arguments or results of an op with `change` applied to values of these `kinds`."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, dict):
        return {k: mapped(change, v, kinds) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(change, v, kinds) for v in value])
    return value
