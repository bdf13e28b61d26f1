"""Subclasses of a module's own class that keep its name, and methods that keep its signature."""

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


def like(original: type, method: FunctionType) -> FunctionType:
    """A method with the signature of `original`'s: generate() and the Trainer look at it."""
    made = FunctionType(
        method.__code__,
        method.__globals__,
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    functools.update_wrapper(made, getattr(original, method.__name__))
    return made
