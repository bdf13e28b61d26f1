"""How tensors lie where they enter and leave one module, as its plan has it, and what shows whole.

This is for who calls a module from outside (`alone.py`) and for hooks on it (`shown.py`): these
have whole tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.planner.contract.dims import Atom
from shardwright.planner.contract.names import slot_pattern
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution.reshard import Reshard
from shardwright.runtime.slots import map_slots, parameters_of

Table = dict[str, dict[int, Placement]]
"""Slot, with * for numbers in it -> number of dims -> how a tensor lies there."""


class Again:
    """Whence one module was called: by the model, or from outside of a call of the model.

    Attributes:
        path: The module's name.
        inside: Whether the model called it so far.
        called: Whether somebody else did.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.inside = self.called = False

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


class Interface:
    """What is known of the arguments and outputs of a module.

    Args:
        forward: The module's own, before its class is changed.
        leaf: Whether there is no module in it.
        spec: What the plan says of it.
        mesh: Where this rank stands.
        path: Its name.
    """

    OF_SEQUENCE = ""
    """What is wrong where a tensor is a part of a sequence, and what to do instead."""

    def __init__(
        self, forward: Callable[..., Any], leaf: bool, spec: ModulePlan, mesh: Mesh, path: str
    ) -> None:
        self.spec, self.mesh, self.path = spec, mesh, path
        self.forward, self.leaf = forward, leaf
        self.arguments = parameters_of(forward)
        self.reshards: dict[tuple[int, str, str, int], Reshard | None] = {}
        self.no_gradient = frozenset(spec.no_gradient)
        self.unknown = frozenset(spec.unknown)

    def names(self, args: tuple[Any, ...]) -> list[str]:
        """The names of the arguments that are given by position."""
        names = list(self.arguments)[1:]
        more = next((i for i, n in enumerate(names) if self.arguments[n].kind is _REST), len(names))
        return [names[i] if i < more else f"*{i - more}" for i in range(len(args))]

    def changed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], table: Table, side: str
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with each tensor changed as `reshard` has it."""
        change = self.change(table, side, "in")
        found = [map_slots(v, n, change) for n, v in zip(self.names(args), args, strict=True)]
        return tuple(found), {n: map_slots(v, n, change) for n, v in kwargs.items()}

    def change(self, table: Table, side: str, at: str) -> Callable[[Tensor, str], Tensor]:
        """What `reshard` says of each tensor, done; `at` is the side of the module, "in" or "out".

        In the model some have no gradient, so that there is none to change.

        Raises:
            UsageError: ranks have of that what they make of parts.
        """

        def change(x: Tensor, slot: str) -> Tensor:
            if self.unknown and self._is_among(self.unknown, at, slot):
                raise UsageError(
                    f"tensor '{slot}' {at} '{self.path}': nothing in the model takes that, and "
                    "each rank makes it of its part of others: compute it behind the model, of "
                    "what hooks on other modules see"
                )
            reshard = self.reshard(table, side, slot, x.ndim, x.is_floating_point())
            out = x if reshard is None else reshard(x)
            if (
                self.no_gradient
                and out.requires_grad
                and self._is_among(self.no_gradient, at, slot)
            ):
                return _Constant.apply(out, f"'{slot}' {at} '{self.path}'")  # type: ignore[return-value]
            return out

        return change

    @staticmethod
    def _is_among(found: frozenset[str], at: str, slot: str) -> bool:
        return any(f"{at} {name}".rstrip() in found for name in (slot, slot_pattern(slot)))

    def reshard(
        self, table: Table, side: str, slot: str, ndim: int, needed: bool = True
    ) -> Reshard | None:
        """From the whole to what lies in a slot ("in"), or from that to the whole ("out").

        None where nothing is known of it and it is not `needed`: of indices and masks.

        Raises:
            UsageError: nothing is known of it, or it is a part of a sequence.
        """
        key = id(table), side, slot, ndim
        if key not in self.reshards:
            inner = self._placement(table.get(slot, table.get(slot_pattern(slot))), ndim)
            if inner is None:
                if not needed:
                    return None
                raise UsageError(
                    f"tensor '{slot}' {side} '{self.path}': that is in no call which the plan was "
                    "made for, so nothing is known of it: call the whole model, or plan with "
                    "example inputs that have it"
                )
            if any(map(_of_run_time, inner.dims)):
                raise UsageError(f"'{self.path}' {self.OF_SEQUENCE}")
            inner = inner.of_any_size()  # that of the trace may have been made up
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


def table(placed: Iterable[tuple[str, str]]) -> Table:
    """Of slots and placements as text."""
    out: Table = {}
    for slot, text in placed:
        placement = parse(text)
        out.setdefault(slot, {})[len(placement.dims)] = placement
    return out


def with_more(known: Table) -> Table:
    """The same, and more elements of a list where all that are known lie alike."""
    out, groups = dict(known), dict[str, list[dict[int, Placement]]]()
    for slot, by_dims in known.items():
        groups.setdefault(slot_pattern(slot), []).append(by_dims)
    for name, found in groups.items():
        if name not in known and all(by_dims == found[0] for by_dims in found):
            out[name] = found[0]
    return out


class _Constant(torch.autograd.Function):
    """A tensor of whose gradient nothing is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:  # type: ignore[override]
        """The tensor."""
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """Refuse it."""
        raise UsageError(
            f"the gradient of {ctx.name}: it had none in any call which the plan was made for, so "
            "a rank may have but a term of it: detach it there, or give the whole model example "
            "inputs that lead to it"
        )


_REST = inspect.Parameter.VAR_POSITIONAL


def _of_run_time(dim: Any) -> bool:
    """Whether a dim of run-time size is split."""
    return isinstance(dim, Atom) and dim.size is None and dim.mesh is not None
