"""Tensors in the arguments of a call: pytrees, and also what objects of custom classes hold."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from shardwright.planner.contract.plain_values import BLOCK_MASK
from shardwright.runtime.slots import HOLD_NO_TENSORS


def tree_map(change: Callable[..., Any], value: Any, *more: Any) -> Any:
    """Return `value` with `change(leaf, *leaves)` for each leaf; objects in it are copied.

    `leaves` are those at the same place in `more`.
    """
    return _mapped(change, {}, value, *more)


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves that `tree_map` changes, in order."""
    return [*_leaves(value, set())]


def _mapped(change: Callable[..., Any], copies: dict[int, Any], value: Any, *more: Any) -> Any:
    def one(leaf: Any, *others: Any) -> Any:
        if (held := _held(leaf)) is None:
            return change(leaf, *others)
        if id(leaf) not in copies:
            new = copies[id(leaf)] = copy.copy(leaf)
            for name, part in _mapped(change, copies, held, *map(_held, others)).items():
                object.__setattr__(new, name, part)  # of a frozen dataclass, too
        return copies[id(leaf)]

    return pytree.tree_map(one, value, *more)


def _leaves(value: Any, met: set[int]) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(value):
        if (held := _held(leaf)) is None:
            yield leaf
        elif id(leaf) not in met:
            met.add(id(leaf))
            yield from _leaves(held, met)


def _held(leaf: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that may hold tensors; None for other leaves."""
    known = isinstance(leaf, (Tensor, *HOLD_NO_TENSORS)) or callable(leaf)
    if known or type(leaf).__name__ == BLOCK_MASK:
        return None
    fields = dataclasses.fields(leaf) if dataclasses.is_dataclass(leaf) else ()  # some have slots
    held = {f.name: getattr(leaf, f.name) for f in fields if hasattr(leaf, f.name)}
    return (
        {**held, **getattr(leaf, "__dict__", {})} if fields or hasattr(leaf, "__dict__") else None
    )
