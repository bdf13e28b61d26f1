"""Tensors in arguments and results of ops: lists and dicts alone, so in less time than pytrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results, in order; every op asks for them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def mapped(change: Callable[[Any], Any], value: Any, kinds: Any = Tensor) -> Any:
    """Arguments or results of an op, with their tensors, or what is of these `kinds`, changed."""
    if isinstance(value, kinds):
        return change(value)
    if isinstance(value, dict):
        return {k: mapped(change, v, kinds) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(change, v, kinds) for v in value])
    return value
