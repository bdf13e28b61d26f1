"""Makes subclasses with the name of the original class, and methods with its signatures."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import FunctionType
from typing import Any

ITS_OWN = ("__doc__", "__module__", "__qualname__")
"""Attributes that a subclass copies from the original class: libraries use them as keys."""


def subclass_with(original: type, members: Mapping[str, Any], *front: type) -> type:
    """Make a subclass of `original` with its name.

    Args:
        original: The class.
        members: The members of the subclass.
        front: Bases before `original`.
    """
    kept = {name: getattr(original, name) for name in ITS_OWN}
    made: Any = type(original)(original.__name__, (*front, original), {**kept, **members})
    if "forward" in vars(made) and "forward" not in members:
        del made.forward  # a base class has wrapped it again, as it does for subclasses
    return made


def like(original: type, method: FunctionType) -> FunctionType:
    """A copy of `method` with the signature of the method of `original` that has its name.

    generate() and the Trainer read signatures.
    """
    made = FunctionType(
        method.__code__,
        method.__globals__,
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    functools.update_wrapper(made, getattr(original, method.__name__))
    return made
