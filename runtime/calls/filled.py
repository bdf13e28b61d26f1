"""Lists, tables and objects that a call is given, and that code puts tensors into: not whole ones.

What a call gives out is whole, and so is what modules set as their attributes; a rank's part that
code leaves in what it was given would be taken for the whole. Caches that the plan knows are
another matter (`caches.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from shardwright.errors import UsageError
from shardwright.runtime.slots import is_own, leaves, named

SIMPLE = frozenset({Tensor, type(None), bool, int, float, str, tuple})
"""Types of most arguments: nothing can be put into these."""


class Given(NamedTuple):
    """What may be filled: its argument, and the tensors in it before the call, by their ids.

    One that code takes out is free to go, and another may have its id then.
    """

    name: str
    value: Any
    before: dict[int, ref[Tensor]]

    def had(self, x: Tensor) -> bool:
        """Whether `x` was in it."""
        return id(x) in self.before and self.before[id(x)]() is x


def may_be_filled(given: Mapping[str, Any], known: Container[str]) -> list[Given]:
    """Those of the arguments `given` that may be, but for caches that are `known` by name."""
    return [
        Given(name, value, {id(x): ref(x) for _, x in leaves(value) if isinstance(x, Tensor)})
        for name, value in given.items()
        if type(value) not in SIMPLE and name not in known and _may_be_filled(value)
    ]


def _may_be_filled(value: Any) -> bool:
    return isinstance(value, (list, dict, set, deque)) or is_own(value)


def check_filled(found: list[Given], output: Any) -> None:
    """Look whether code has put tensors into what was given, but for what it gives out.

    Raises:
        UsageError: it has.
    """
    given_out = {id(value) for value in (named(output) or {}).values()}
    for one in found:
        if id(one.value) in given_out:
            continue
        for slot, x in leaves(one.value):
            if isinstance(x, Tensor) and x.is_floating_point() and not one.had(x):
                raise UsageError(
                    f"the model's code has put a tensor into argument '{one.name}' ('{slot}' of a "
                    f"{type(one.value).__name__}): it may be this rank's part of it: let it give "
                    "the tensor out, or keep it as an attribute of its module"
                )
