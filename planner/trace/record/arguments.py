"""Tensors in arguments and results of ops. Only lists, tuples and dicts: faster than pytrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, in order. This runs for every op."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def mapped(change: Callable[[Any], Any], value: Any, kinds: Any = Tensor) -> Any:
    """Return arguments or results of an op with `change` applied to values of these `kinds`."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, dict):
        return {k: mapped(change, v, kinds) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(change, v, kinds) for v in value])
    return value
