"""Modules of a split model that are called by themselves: they take and give whole tensors.

In a forward pass of the model each tensor between two modules lies as the plan has it, and so does
its gradient. Who calls a module from outside has whole tensors, and wants such: with each rank's
whole gradient of them. So the outermost module that is called changes them, from whole to what its
code works on and back, and the modules within do what they do in the model.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.runtime.calls.caches import Caches
from shardwright.runtime.calls.filled import Given, may_be_filled
from shardwright.runtime.calls.plain_arguments import check_flags
from shardwright.runtime.calls.proven import Proven
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.outside.functional import PART, is_transforming, refuse
from shardwright.runtime.outside.never_run import never_ran, whole_layer
from shardwright.runtime.outside.shown import Shown
from shardwright.runtime.redistribution.interface import Again, Interface, table, with_more
from shardwright.runtime.slots import map_slots, returned

if TYPE_CHECKING:
    from shardwright.runtime.communication.generators import AsFirst


class Alone(Again, Interface):
    """What becomes of the arguments and outputs of one module that is called by itself.

    Args:
        module: The module, before its class is changed.
        spec: What the plan says of it.
        mesh: Where this rank stands.
        path: Its name.
    """

    OF_SEQUENCE = (
        "is called by itself, and works on a part of the sequence: call the whole model, or plan "
        "without sequence_parallel or cp"
    )

    def __init__(self, module: nn.Module, spec: ModulePlan, mesh: Mesh, path: str) -> None:
        Again.__init__(self, path)
        leaf = next(module.children(), None) is None
        Interface.__init__(self, type(module).forward, leaf, spec, mesh, path)
        takes = ((p.slot, p.placement) for p in spec.takes)
        gives = ((p.slot, p.placement) for p in spec.gives)
        self.takes = with_more(table([*takes, *((c.slot, c.target) for c in spec.inputs)]))
        self.gives = table([*gives, *((c.slot, c.source) for c in spec.outputs)])
        self.around = table((c.slot, c.source) for c in spec.inputs)
        found = self.arguments.values()
        self.defaults = {p.name: p.default for p in found if p.default is not p.empty}
        """What arguments are that are left out."""
        self.proven: Proven | None = None
        """Of the model that the module is in."""
        self.as_first: AsFirst | None = None
        """What is done first where the module may draw random numbers."""
        self.own = type(module) if leaf and never_ran(spec) else None
        """The class of a layer that no proven call ran."""
        self.never: str | None = None
        """Why the module may not be called by itself, where it may not."""

    @cached_property
    def shown(self) -> Shown:
        """What hooks on the module see; made when one asks."""
        return Shown(self.forward, self.leaf, self.spec, self.mesh, self.path)

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], keeps: Collection[str]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """The arguments as the module's own code works on them, from whole tensors.

        And those that it `keeps` for modules within, as they lie around it in the model.

        Raises:
            UsageError: the module may not be called by itself, or not within torch.func, or not
                with such flags.
        """
        if self.never is not None:
            raise UsageError(f"'{self.path}' is called by itself: {self.never}")
        if not torch.compiler.is_compiling() and is_transforming():
            refuse(PART)
        self.called = True
        given = self._given(args, kwargs)
        check_flags(self.path, given, self.defaults, self.spec.flags)
        keep = self.change(self.around, "in", "in")
        kept = {n: map_slots(given[n], n, keep) for n in keeps if n in given}
        return *self.changed(args, kwargs, self.takes, "in"), kept

    def unrun(self, module: nn.Module) -> nn.Module | None:
        """`module` with whole parameters, if it is a layer that no proven call ran; else None."""
        may = self.own is not None and self.never is None
        return whole_layer(module, self.own) if may else None  # type: ignore[arg-type]

    def caches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], caches: Caches
    ) -> AbstractContextManager[list[Any] | None]:
        """What `Caches.open` is for those among the arguments."""
        given = self._given(args, kwargs)
        names = [given.get(name) for name in caches.names]
        return caches.open(names, torch.compiler.is_compiling())

    def may_be_filled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], caches: Caches
    ) -> list[Given]:
        """What code may put tensors into, among the arguments; not known where it is compiled."""
        if torch.compiler.is_compiling():
            return []
        return may_be_filled(self._given(args, kwargs), caches.names)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.names(args), args, strict=True)), **kwargs}

    def leave(self, output: Any) -> Any:
        """The output whole, value and gradient.

        Raises:
            UsageError: there is something in it of which the plan does not say how it lies.
        """
        for slot, leaf in returned(output, self.arguments):
            needed = not isinstance(leaf, Tensor) or leaf.is_floating_point()
            self.reshard(self.gives, "out", slot, getattr(leaf, "ndim", 0), needed)
        return map_slots(output, "", self.change(self.gives, "out", "out"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return self
