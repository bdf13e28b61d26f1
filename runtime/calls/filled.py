"""Detects tensors that code puts into lists, dicts and objects among the arguments of a call.

Outputs of a call are full, and so are tensors that modules set as their attributes. But a tensor
that code leaves in an argument may be local, and would be mistaken for a full one. Caches that the
plan knows are handled in `caches.py`.
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
"""Types of most arguments: code cannot put tensors into these."""


class FillableArgument(NamedTuple):
    """An argument into which code may put tensors, and the tensors in it before the call, by id.

    Tensors are held by weak references: code may remove one, and its id may then be reused.
    """

    name: str
    value: Any
    before: dict[int, ref[Tensor]]

    def had(self, x: Tensor) -> bool:
        """Whether `x` was in it before the call."""
        return id(x) in self.before and self.before[id(x)]() is x


def may_be_filled(given: Mapping[str, Any], known: Container[str]) -> list[FillableArgument]:
    """The arguments into which code may put tensors, except caches whose names are `known`."""
    found = []
    for name, value in given.items():
        if type(value) in SIMPLE or name in known:
            continue
        if isinstance(value, (list, dict, set, deque)) or is_own(value):
            before = {id(x): ref(x) for _, x in leaves(value) if isinstance(x, Tensor)}
            found.append(FillableArgument(name, value, before))
    return found


def check_filled(found: list[FillableArgument], output: Any) -> None:
    """Check that code has put no floating-point tensors into arguments.

    Arguments that the call also returns are not checked.

    Raises:
        UsageError: it has.
    """
    given_out = {id(value) for value in (named(output) or {}).values()}
    for one in found:
        if id(one.value) in given_out:
            continue
        for slot, x in leaves(one.value):
            if isinstance(x, Tensor) and x.is_floating_point() and not one.had(x):
                kind = type(one.value).__name__
                todo = "let the code return the tensor, or keep it as an attribute of its module"
                if kind.endswith("Cache"):
                    todo = "no call that the plan was made for did so: call with use_cache=False"
                raise UsageError(
                    f"the model's code has put a tensor into argument '{one.name}' ('{slot}' of a "
                    f"{kind}): it may be this rank's part of it: {todo}"
                )
