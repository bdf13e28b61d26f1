"""What is in attributes of modules at one time, and whether that is alike at another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.planner.contract.plain_values import is_plain
from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.queries.opaque_ints import Hidden
from shardwright.planner.trace.sizes.provenance import SourcedInt
from shardwright.planner.trace.state.attribute_contents import NOT_KEPT
from shardwright.runtime.code.model_objects import CODE, DEEPEST, is_config

LARGEST = 1000
"""What is looked at in an attribute."""


class Place(NamedTuple):
    """An attribute of a module."""

    path: str
    name: str

    def __str__(self) -> str:
        return ".".join(filter(None, self))


Look = dict[Place, list[tuple[str, Any]]]
"""What is in attributes: values, by where they are in it."""


def look(modules: Mapping[str, nn.Module], but: str) -> Look:
    """What is in the attributes of `modules`, by their paths; `but` for the one of this name."""
    with torch._C.DisableTorchFunction():  # no code of the model asks
        return {
            Place(path, name): [*islice(_leaves(value, ""), LARGEST)]
            for path, module in modules.items()
            for name, value in [*vars(module).items()]
            if name not in NOT_KEPT and name != but
        }


def alike(one: Any, other: Any, equal: Callable[[Any, Any], bool]) -> bool:
    """Whether two looks at an attribute saw the same."""
    if one is None or other is None or len(one) != len(other):
        return one is other
    pairs = zip(one, other, strict=True)
    return all(a[0] == b[0] and equal(a[1], b[1]) for a, b in pairs)


def same(one: Any, other: Any) -> bool:
    """Whether a value is what it was."""
    if one is other or isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    try:
        equal = bool(one == other) or bool(one != one and other != other)  # neither is a number
        return type(one) is type(other) and equal
    except (TypeError, ValueError, RuntimeError):  # of arrays, say
        return False


def like(one: Any, other: Any) -> bool:
    """Whether code does the same with both, as far as it looks no further than at what they are."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.dim() == other.dim()
    objects = (
        type(one) is type(other) and not is_plain(one) and bool(getattr(one, "__dict__", None))
    )
    return objects or same(one, other)


def is_number(look: Any) -> bool:
    """Whether nothing but an integer or a float was seen."""
    one = look[0][1] if look and len(look) == 1 else None
    return isinstance(one, (int, float)) and not isinstance(one, bool)


def plain(value: Any) -> Any:
    """A number that remembers where it comes from, or is hidden, as others are."""
    value = value.value if isinstance(value, Hidden) else value
    return value.plain if isinstance(value, SourcedInt) else value


def _leaves(value: Any, slot: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What is in a value, by where it is; tensors as they are at present."""
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
