"""Look at the contents of module attributes at one time, and compare two such looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.planner.contract.plain_values import is_number, is_plain
from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.queries.opaque_ints import Hidden
from shardwright.planner.trace.sizes.provenance import SourcedInt
from shardwright.planner.trace.state.attribute_contents import NOT_KEPT
from shardwright.runtime.code.model_objects import CODE, DEEPEST, is_config

LARGEST = 1000
"""The most values that are looked at in one attribute."""


class Place(NamedTuple):
    """An attribute of a module."""

    path: str
    name: str

    def __str__(self) -> str:
        return ".".join(filter(None, self))


Look = dict[Place, list[tuple[str, Any]]]
"""Attribute -> (position in the attribute, value) pairs."""


def look(modules: Mapping[str, nn.Module], but: str) -> Look:
    """Return the contents of the attributes of `modules`, without attributes named `but`."""
    with torch._C.DisableTorchFunction():  # these are not queries of model code
        return {
            Place(path, name): found_in(value)
            for path, module in modules.items()
            for name, value in [*vars(module).items()]
            if name not in NOT_KEPT and name != but
        }


def found_in(value: Any) -> list[tuple[str, Any]]:
    """Return what is in a value, by position: no more than `LARGEST` parts."""
    with torch._C.DisableTorchFunction():
        return [*islice(_leaves(value, ""), LARGEST)]


def alike(one: Any, other: Any, equal: Callable[[Any, Any], bool]) -> bool:
    """Return whether two looks at an attribute match, with `equal` comparing values."""
    if one is None or other is None or len(one) != len(other):
        return one is other
    pairs = zip(one, other, strict=True)
    return all(a[0] == b[0] and equal(a[1], b[1]) for a, b in pairs)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; tensors must be identical."""
    if one is other or isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    try:
        equal = bool(one == other) or bool(one != one and other != other)  # both are NaN
        return type(one) is type(other) and equal
    except (TypeError, ValueError, RuntimeError):  # for example comparisons of arrays
        return False


def like(one: Any, other: Any) -> bool:
    """Return whether two values have the same kind: dtype and dims of tensors, class of objects.

    Other values must be equal.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.dim() == other.dim()
    objects = (
        type(one) is type(other) and not is_plain(one) and bool(getattr(one, "__dict__", None))
    )
    return objects or same(one, other)


def is_one_number(look: Any) -> bool:
    """Return whether a look saw exactly one integer or float."""
    return bool(look) and len(look) == 1 and is_number(look[0][1])


def plain(value: Any) -> Any:
    """Return the plain value of a `SourcedInt` or hidden number; other values unchanged."""
    value = value.value if isinstance(value, Hidden) else value
    return value.plain if isinstance(value, SourcedInt) else value


def _leaves(value: Any, slot: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (position, value) for everything in a value; tensors with their current fake tensor."""
    if isinstance(value, Tensor):
        yield slot, inner(value)
        return
    value, kind, parts = plain(value), type(value), None
    if isinstance(value, (list, tuple, deque)):
        value, parts = (kind, len(value)), enumerate(value)
    elif isinstance(value, dict):
        value, parts = (kind, len(value)), value.items()
    elif isinstance(value, (set, frozenset)):
        value = frozenset(value)
    elif not (is_plain(value) or isinstance(value, (*CODE, nn.Module)) or is_config(value)):
        parts = getattr(value, "__dict__", {}).items()
    yield slot, value
    for key, part in [*islice(parts, LARGEST)] if parts is not None and depth < DEEPEST else ():
        yield from _leaves(part, f"{slot}.{key if is_plain(key) else type(key)}", depth + 1)
