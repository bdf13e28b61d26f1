"""What a plan says of arguments that are no tensors: flags, names and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

from shardwright.planner.contract.given_code import code_name, is_code

FREE = frozenset(
    {"logits_to_keep", "output_attentions", "output_hidden_states", "return_dict", "use_cache"}
)
"""Flags that any call may have: how much of what is proven is wanted. Others may ask for code that
no traced call ran. The root sees to each that is about what leaves it."""

CONTAINERS = (dict, list, tuple)
"""What plain values may be in, beside arguments: by their place, `name.key` or `name.0`."""

PlainValue = bool | int | float | str | None


def is_plain(value: Any) -> bool:
    """Whether it is a value that a plan can name."""
    return value is None or isinstance(value, (bool, int, float, str, Enum))


def is_said(value: Any) -> bool:
    """Whether a plan can say which argument it is: a plain value, or something to call."""
    return is_plain(value) or is_code(value)


def is_flag(value: Any) -> bool:
    """Whether it is such a value, and no number."""
    return isinstance(value, (bool, Enum)) or (
        is_said(value) and not isinstance(value, (int, float))
    )


def plain_within(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Those in the lists and dicts of argument `name`, each by its place; not None."""
    if type(value) not in CONTAINERS:
        return
    parts = value.items() if type(value) is dict else enumerate(value)
    for key, part in parts:
        if part is not None and is_said(part):
            yield f"{name}.{key}", part
        yield from plain_within(part, f"{name}.{key}")


def plain_value(value: Any) -> PlainValue:
    """A value that `is_plain`, as a plan has it: an enum's member by its name."""
    if isinstance(value, Enum):
        return str(value)
    if is_code(value):
        return code_name(value)
    kinds = (bool, int, float, str)  # a subclass of one is written as that
    return next((kind(value) for kind in kinds if isinstance(value, kind)), None)


def same_value(one: PlainValue, other: PlainValue) -> bool:
    """Whether code that is given one does what it does with the other: `1` is not `True`."""
    return one == other and type(one) is type(other)
