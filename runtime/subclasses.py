"""Classes that a module gets in the place of its own: these with something in front of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import FunctionType
from typing import Any

ITS_OWN = ("__doc__", "__module__", "__qualname__")
"""What a class keeps of the one that it stands for: others keep facts on classes by these."""


def subclass_with(original: type, members: Mapping[str, Any], *front: type) -> type:
    """`original` under its name, with `front` before it and `members` of its own."""
    kept = {name: getattr(original, name) for name in ITS_OWN}
    made: Any = type(original)(original.__name__, (*front, original), {**kept, **members})
    if "forward" in vars(made) and "forward" not in members:
        del made.forward  # a class that wraps those of its subclasses has wrapped this one before
    return made


@functools.cache
def subclass(original: type, *front: type) -> type:
    """`original` with `front` before it, the first of which may have a forward; one class each."""
    forward = vars(front[0]).get("forward")
    return subclass_with(original, {"forward": like(original, forward)} if forward else {}, *front)


def like(original: type, forward: FunctionType) -> FunctionType:
    """`forward` with the signature of `original`'s: generate() and the Trainer look at it."""
    made = FunctionType(
        forward.__code__,
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    return functools.update_wrapper(made, original.forward)  # type: ignore[attr-defined]
