"""Refuse code that has parameters and buffers not from the attributes of their modules.

A split model keeps this rank's part in the attribute. A list, a closure or a view that was made
before holds the full tensor, which gets no gradient and no update.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch._ops import OpOverload

from shardwright.errors import ModelError
from shardwright.planner.trace.data_queries.model_code import is_plumbing
from shardwright.planner.trace.model.shared_memory import shares
from shardwright.planner.trace.record.op_tensors import tensors_in
from shardwright.planner.trace.record.record import Call


class OwnTensors:
    """The tensors that a model on meta holds while no run is made.

    Args:
        module: The model.
        held: Its parameters and buffers, by name.
        stored: The tensors that stand for them in the runs, by name.
    """

    def __init__(
        self, module: nn.Module, held: Mapping[str, Tensor], stored: Mapping[str, Tensor]
    ) -> None:
        self.names = {id(t): name for name, t in held.items()}
        kept = [("", v) for m in module.modules() for v in vars(m).values()]
        self.sharing = {
            id(stored.get(name, value)): (found, name)
            for name, value in (*kept, *held.items())
            if isinstance(value, Tensor) and (found := shares(value)) is not None
        }

    def check(self, calls: Iterable[Call], written: Collection[str]) -> None:
        """Check the arguments of `calls`; `written` are parameters and buffers that code changes.

        Raises:
            ModelError: a gradient, or what code writes, would be lost.
        """
        for call in calls:
            for tensor in tensors_in((call.args, call.kwargs)):
                if name := self.names.get(id(tensor)):
                    if tensor.requires_grad or _writes(call):
                        _refuse(call, name, "from a list, a closure or another attribute")
                elif found := self.sharing.get(id(tensor)):
                    (name, trains), own = found
                    if trains or _writes(call) or name in written or own in written:
                        _refuse(call, name, "by way of another tensor that shares its memory")


KEEPERS = (nn.Module.__module__, nn.ParameterList.__module__)
"""torch's own code that asks for a model that makes modules and sets parameters in its forward."""


class IsParameter:
    """The answer to `isinstance(x, nn.Parameter)` for a parameter: true; notes if code asks."""

    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note

    def __bool__(self) -> bool:
        asking = sys._getframe(1)
        if asking.f_globals["__name__"] == nn.Parameter.__module__:
            asking = asking.f_back or asking
        name = asking.f_globals["__name__"]
        if name in KEEPERS or not is_plumbing(name):
            self.note()
        return True


def _writes(call: Call) -> bool:
    return isinstance(call.op, OpOverload) and call.op._schema.is_mutable


def _refuse(call: Call, name: str, where: str) -> NoReturn:
    at: Any = f"'{call.module}'" if call.module else "the model"
    raise ModelError(
        f"cannot split {at} ({call.source}): its code has '{name}' {where}, which a split model "
        "does not keep up to date: read and write it only as the attribute "
        f"'{name.rpartition('.')[2]}' of its module"
    )
