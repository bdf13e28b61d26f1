"""Modules of a split model that are called by themselves: they take and give whole tensors.

In a forward pass of the model each tensor between two modules lies as the plan has it, and so does
its gradient. Who calls a module from outside has whole tensors, and wants such: with each rank's
whole gradient of them. So the outermost module that is called changes them, from whole to what its
code works on and back, and the modules within do what they do in the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.contract.dims import Atom, atoms
from shardwright.planner.contract.names import lookup
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.runtime.caches import Caches
from shardwright.runtime.mesh import Mesh
from shardwright.runtime.proven import Proven
from shardwright.runtime.reshard import Reshard
from shardwright.runtime.slots import map_slots, parameters_of, returned


class Alone:
    """What becomes of the arguments and outputs of one module that is called by itself.

    Args:
        module: The module, before its class is changed.
        spec: What the plan says of it.
        mesh: Where this rank stands.
        path: Its name.
    """

    def __init__(self, module: nn.Module, spec: ModulePlan, mesh: Mesh, path: str) -> None:
        self.mesh, self.path = mesh, path
        self.arguments = parameters_of(type(module).forward)
        self.leaf = next(module.children(), None) is None
        placed = (
            [(p.slot, p.placement) for p in spec.takes],
            [(p.slot, p.placement) for p in spec.gives],
        )
        self.takes = _table([*placed[0], *((c.slot, c.target) for c in spec.inputs)])
        self.gives = _table([*placed[1], *((c.slot, c.source) for c in spec.outputs)])
        self.around = _table((c.slot, c.source) for c in spec.inputs)
        self.comes = _table([*placed[0], *((c.slot, c.source) for c in spec.inputs)])
        self.goes = _table([*placed[1], *((c.slot, c.target) for c in spec.outputs)])
        self.reshards: dict[tuple[int, str, str, int], Reshard] = {}
        self.inside = self.called = False
        self.proven: Proven | None = None
        """Of the model that the module is in."""

    def again(self) -> bool:
        """Whether a backward pass runs a forward again, to make what it did not keep.

        Then the tensors lie as they did in that forward, in the model or by itself.

        Raises:
            UsageError: there were both, so that nobody can tell.
        """
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return False
        if self.inside and self.called:
            raise UsageError(
                f"'{self.path}' runs again for a backward pass, and was called both by the model "
                "and by itself: use gradient checkpointing for one of the two"
            )
        return self.inside

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], keeps: Collection[str]
    ) -> tuple[Any, Any, dict[str, Any]]:
        """The arguments as the module's own code works on them, from whole tensors.

        And those that it `keeps` for modules within, as they lie around it in the model.
        """
        self.called = True
        given = {**dict(zip(self._names(args), args, strict=True)), **kwargs}
        kept = {n: map_slots(given[n], n, self.keep) for n in keeps if n in given}
        return *self._changed(args, kwargs, self.take), kept

    def show(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call by the model, whole."""
        return self._changed(args, kwargs, self._changes(self.comes, "out"))

    def hide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Whole arguments as the model gives them."""
        return self._changed(args, kwargs, self._changes(self.comes, "in"))

    def show_output(self, output: Any) -> Any:
        """What the model gets of the module, whole."""
        return map_slots(output, "", self._changes(self.goes, "out"))

    def hide_output(self, output: Any) -> Any:
        """A whole output as the model gets it."""
        return map_slots(output, "", self._changes(self.goes, "in"))

    def _names(self, args: tuple[Any, ...]) -> list[str]:
        names = list(self.arguments)[1:]
        more = next((i for i, n in enumerate(names) if self.arguments[n].kind is _REST), len(names))
        return [names[i] if i < more else f"*{i - more}" for i in range(len(args))]

    def _changed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor, str], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed = [map_slots(v, n, change) for n, v in zip(self._names(args), args, strict=True)]
        return tuple(changed), {n: map_slots(v, n, change) for n, v in kwargs.items()}

    def _changes(self, table: Table, side: str) -> Callable[[Tensor, str], Tensor]:
        def change(x: Tensor, slot: str) -> Tensor:
            return self._reshard(table, side, slot, x.ndim)(x) if x.is_floating_point() else x

        return change

    def caches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], caches: Caches
    ) -> AbstractContextManager[list[Any] | None]:
        """What `Caches.open` is for those among the arguments."""
        given = {**dict(zip(list(self.arguments)[1:], args, strict=False)), **kwargs}
        return caches.open(given.get(name) for name in caches.names)

    def leave(self, output: Any) -> Any:
        """The output whole, value and gradient.

        Raises:
            UsageError: there is something in it of which the plan does not say how it lies.
        """
        for slot, leaf in returned(output, self.arguments):
            if not isinstance(leaf, Tensor) or leaf.is_floating_point():
                self._reshard(self.gives, "out", slot, getattr(leaf, "ndim", 0))
        return map_slots(output, "", self.give)

    def take(self, x: Tensor, slot: str) -> Tensor:
        """A whole tensor as the module's code works on it."""
        return self._reshard(self.takes, "in", slot, x.ndim)(x) if x.is_floating_point() else x

    def keep(self, x: Tensor, slot: str) -> Tensor:
        """A whole tensor as it comes to the module in the model."""
        return self._reshard(self.around, "in", slot, x.ndim)(x) if x.is_floating_point() else x

    def give(self, x: Tensor, slot: str) -> Tensor:
        """The whole of what its code made."""
        return self._reshard(self.gives, "out", slot, x.ndim)(x) if x.is_floating_point() else x

    def _reshard(self, table: Table, side: str, slot: str, ndim: int) -> Callable[..., Tensor]:
        key = id(table), side, slot, ndim
        if key not in self.reshards:
            inner = self._placement(lookup(table, slot), ndim)
            if inner is None:
                raise UsageError(
                    f"tensor '{slot}' {side} '{self.path}': that is in no call which the plan was "
                    "made for, so nothing is known of it: call the whole model, or plan with "
                    "example inputs that have it"
                )
            if any(atom_of_run_time(d) for d in inner.dims):
                raise UsageError(
                    f"'{self.path}' is called by itself, and works on a part of the sequence: "
                    "call the whole model, or plan without sequence_parallel or cp"
                )
            inner = _of_any_size(inner)
            ends = (inner.replicated(), inner) if side == "in" else (inner, inner.replicated())
            self.reshards[key] = Reshard(*ends, self.mesh)
        return self.reshards[key]

    def _placement(self, known: dict[int, Placement] | None, ndim: int) -> Placement | None:
        """How a tensor of so many dims lies in a slot; for a layer, any number before the last."""
        if known is None or ndim in known or not self.leaf or ndim < 1:
            return (known or {}).get(ndim)
        found = {
            Placement((*[Atom(None)] * (ndim - 1), p.dims[-1]), p.partial, p.grad_partial)
            for p in known.values()
            if all(d == Atom(None) for d in p.dims[:-1])
        }
        return found.pop() if len(found) == 1 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return self


Table = dict[str, dict[int, Placement]]
"""Slot, with * for numbers in it -> number of dims -> how a tensor lies there."""

_REST = inspect.Parameter.VAR_POSITIONAL


def _of_any_size(placement: Placement) -> Placement:
    """The same for any size of dims that are not split: that of the trace may have been made up."""
    dims = (d if any(a.mesh for a in atoms(d)) else Atom(None) for d in placement.dims)
    return Placement(tuple(dims), placement.partial, placement.grad_partial)


def atom_of_run_time(dim: Any) -> bool:
    """Whether a dim of run-time size is split."""
    return isinstance(dim, Atom) and dim.size is None and dim.mesh is not None


def _table(placed: Iterable[tuple[str, str]]) -> Table:
    out: Table = {}
    for slot, text in placed:
        placement = parse(text)
        out.setdefault(slot, {})[len(placement.dims)] = placement
    return out
