"""Tensors that are one where the model runs, and several in its trace, as they cross modules.

A marker makes another tensor of what it marks. So a change in place of the one, or of a view of it,
is not seen in the other, as it is in the run: who reads that then would be traced with old values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from shardwright.planner.trace.data_queries.errors import Unproven


class Aliases:
    """Which memory is one where the model runs, and which of it is of old values."""

    def __init__(self) -> None:
        self._one: dict[StorageWeakRef, set[StorageWeakRef]] = {}
        self._old: set[StorageWeakRef] = set()

    def cross(self, x: FunctionalTensor, marked: Any) -> None:
        """`marked` is made of `x`, which it is in the run."""
        one = self._one.setdefault(_memory(x), {_memory(x)})
        one.add(_memory(marked))
        self._one[_memory(marked)] = one

    def write(self, x: FunctionalTensor) -> None:
        """`x` has changed in place: what else is one with it is old."""
        memory = _memory(x)
        if memory in self._one:
            self._old |= self._one[memory]
            self._old.discard(memory)

    def give_back(self, outside: FunctionalTensor, inside: FunctionalTensor) -> None:
        """`outside` has been given the value that `inside` has, which is one with it."""
        if not self._is_old(inside):
            self._old.discard(_memory(outside))

    def among(self, x: Any, others: Iterable[Any]) -> bool:
        """Whether `x`, or a view of it, is among the others in the run."""
        one = self._one.get(_memory(x), {_memory(x)})
        return any(_memory(y) in one for y in others if isinstance(y, FunctionalTensor))

    def check(self, given: Any) -> None:
        """Look whether tensors that an op is `given` are as in the run.

        Raises:
            Unproven: they are not.
        """
        if self._old and any(map(self._is_old, tree_leaves(given))):
            raise Unproven(
                "it changes in place what a module within gave, which is a view of what that was "
                "given, or the same, and then reads the other: change a copy, or go on with what "
                "was changed"
            )

    def _is_old(self, x: Any) -> bool:
        return isinstance(x, FunctionalTensor) and _memory(x) in self._old


def _memory(x: Any) -> StorageWeakRef:
    with torch._C.DisableTorchFunction():
        return StorageWeakRef(x.elem.untyped_storage())
