"""Tensors that share memory when the model runs, but not in its trace, because of markers.

A boundary marker returns a new tensor. An in-place change of one of the two tensors, or of a view,
is therefore not visible in the other one, as it is in a real run. Code that reads the other tensor
would be traced with old values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.planner.trace.data_queries.errors import Unproven
from shardwright.planner.trace.record.op_tensors import tensors_in


class Aliases:
    """Sets of memory that are one memory in a real run, and which of it holds old values."""

    def __init__(self) -> None:
        self._one: dict[StorageWeakRef, set[StorageWeakRef]] = {}
        self._old: set[StorageWeakRef] = set()

    def cross(self, x: FunctionalTensor, marked: Any) -> None:
        """Note that `marked` is the result of a marker on `x`; a real run has one tensor."""
        one = self._one.setdefault(_memory(x), {_memory(x)})
        one.add(_memory(marked))
        self._one[_memory(marked)] = one

    def write(self, x: FunctionalTensor) -> None:
        """Note that `x` changed in place: its aliases in the trace now hold old values."""
        memory = _memory(x)
        if memory in self._one:
            self._old |= self._one[memory]
            self._old.discard(memory)

    def give_back(self, outside: FunctionalTensor, inside: FunctionalTensor) -> None:
        """Note that `outside` got the value of its alias `inside`."""
        if not self._is_old(inside):
            self._old.discard(_memory(outside))

    def among(self, x: Any, others: Iterable[Any]) -> bool:
        """Return whether `x`, or a tensor that shares its memory in a real run, is in `others`."""
        one = self._one.get(_memory(x), {_memory(x)})
        return any(_memory(y) in one for y in others if isinstance(y, FunctionalTensor))

    def check(self, given: Any) -> None:
        """Check that no tensor in the arguments of an op holds old values.

        Raises:
            Unproven: a tensor does.
        """
        if self._old and any(map(self._is_old, tensors_in(given))):
            raise Unproven(
                "it changes in place the input or output of a submodule whose output is its input "
                "or a view of it, and then reads the other one: change a copy, or continue with "
                "the tensor that was changed"
            )

    def _is_old(self, x: Any) -> bool:
        return isinstance(x, FunctionalTensor) and _memory(x) in self._old


def _memory(x: Any) -> StorageWeakRef:
    with torch._C.DisableTorchFunction():
        return StorageWeakRef(x.elem.untyped_storage())
