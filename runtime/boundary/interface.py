"""`ModuleInterface`: converts the inputs and outputs of a module between full and local tensors.

Hooks on a module and its direct callers see full tensors. `AROUND` are the placements in the rest
of the model, from which tensors are made full for hooks. `WITHIN` are the placements in the
module's own code, to which a direct call shards full tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.planner.contract.dims import Atom, dim_size, resolve
from shardwright.planner.contract.names import slot_pattern
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution.reshard import Reshard
from shardwright.runtime.slots import map_slots, names_of, parameters_of, positions

Table = dict[str, dict[int, Placement]]
"""Slot (with * for its numbers) -> number of dims -> placement."""

AROUND, WITHIN = "around", "within"


class ModuleInterface:
    """The placements of a module's arguments and outputs.

    Args:
        forward: The module's own forward, before its class is changed.
        leaf: Whether the module has no children.
        spec: The plan's entry for the module.
        mesh: The mesh, with the coordinates of this rank.
        path: The name of the module.
    """

    def __init__(
        self, forward: Callable[..., Any], leaf: bool, spec: ModulePlan, mesh: Mesh, path: str
    ) -> None:
        self.spec, self.mesh, self.path, self.leaf = spec, mesh, path, leaf
        self.arguments, self.positions = parameters_of(forward), positions(forward)[0]
        takes = [(p.slot, p.placement) for p in spec.takes]
        gives = [(p.slot, p.placement) for p in spec.gives]
        self.tables: dict[tuple[str, str], Table] = {
            (AROUND, "in"): table([*takes, *((c.slot, c.source) for c in spec.inputs)]),
            (AROUND, "out"): table([*gives, *((c.slot, c.target) for c in spec.outputs)]),
            (WITHIN, "in"): table([*takes, *((c.slot, c.target) for c in spec.inputs)]),
            (WITHIN, "out"): table([*gives, *((c.slot, c.source) for c in spec.outputs)]),
        }
        self.reshards: dict[tuple[str, str, bool, str, int], Reshard] = {}
        self.no_gradient, self.unknown = frozenset(spec.no_gradient), frozenset(spec.unknown)

    def names(self, args: tuple[Any, ...]) -> list[str]:
        """The names of the positional arguments; "*0" is the first of *args."""
        return names_of(args, self.positions)

    def check_alike(self) -> None:
        """Check that tensors have the same placements in all calls of the module.

        Raises:
            UsageError: they differ.
        """
        if self.spec.varies:
            raise UsageError(
                f"'{self.path}' has a hook, or another module in its place, which should see full "
                "tensors, and the model calls it several times with tensors that are laid out "
                "differently over the ranks: put the hook on a module around it, or on one of "
                "those before and behind it"
            )

    def arguments_as(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], at: str, full: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather each tensor of the arguments (`full`), or shard full ones."""
        change = self.change(at, "in", full)
        found = [map_slots(v, n, change) for n, v in zip(self.names(args), args, strict=True)]
        return tuple(found), {n: map_slots(v, n, change) for n, v in kwargs.items()}

    def output_as(self, output: Any, at: str, full: bool) -> Any:
        """Gather each tensor of the output (`full`), or shard full ones."""
        return map_slots(output, "", self.change(at, "out", full))

    def change(self, at: str, side: str, full: bool) -> Callable[[Tensor, str], Tensor]:
        """A function of a tensor and its slot that gathers the tensor (`full`), or shards it.

        `AROUND` the module, a result that shares memory with the tensor is copied: a hook may write
        to what it sees, and the model to what it gets back.

        The function raises:
            UsageError: each rank computes that tensor from its shards of others.
        """

        def change(x: Tensor, slot: str) -> Tensor:
            if self.unknown and _is_among(self.unknown, side, slot):
                raise UsageError(
                    f"{self.named(side, slot)} is computed by each rank from its shards of "
                    "other tensors, and no op reads it, so it cannot be gathered: compute it after "
                    "the model, from tensors that hooks on other modules see"
                )
            reshard = self.reshard(at, side, full, slot, x)
            if reshard is None:
                out = x
            elif at == WITHIN:
                out = reshard(x)
            else:  # a tensor with a gradient keeps it, even if gradients are off here
                with torch.set_grad_enabled(x.requires_grad or torch.is_grad_enabled()):
                    out = reshard(x)
                    out = out.clone() if out is not x and _shares_memory(out, x) else out
            if out.requires_grad and _is_among(self.no_gradient, side, slot):
                return _NoGradient.apply(out, self.named(side, slot))  # type: ignore[return-value]
            return out

        return change

    def reshard(self, at: str, side: str, full: bool, slot: str, x: Tensor) -> Reshard | None:
        """The redistribution of `x`. None for an integer or bool tensor that the plan lacks.

        Raises:
            UsageError: the plan has no placement for `x`, or `x` is a shard of a sequence.
        """
        key = at, side, full, slot, x.ndim
        if key not in self.reshards:
            part = self.placement(at, side, slot, x.ndim)
            if part is None:
                if x.is_floating_point():
                    raise self.not_known(side, slot)
                return None
            if any(isinstance(d, Atom) and d.size is None and d.mesh for d in part.dims):
                raise UsageError(
                    f"'{self.path}' works on a part of the sequence, so neither hooks on it nor "
                    "direct calls can have full tensors: call the whole model, or plan without "
                    "sequence_parallel or cp"
                )
            part = part.of_any_size()  # sizes of the trace may be those of example inputs
            ends = (part, part.replicated()) if full else (part.replicated(), part)
            self.reshards[key] = Reshard(*ends, self.mesh)
        return self.reshards[key]

    def not_known(self, side: str, slot: str) -> UsageError:
        """The error for a tensor that is in no call of the plan."""
        return UsageError(
            f"{self.named(side, slot)}: it is in no call that the plan was made for, so its "
            "placement is unknown: call the model itself, or plan with example inputs that "
            "have it"
        )

    def named(self, side: str, slot: str) -> str:
        """Return the name of a tensor for messages: input 'x' of 'mlp'."""
        what = "input" if side == "in" else "output"
        return f"{what} '{slot}' of '{self.path}'" if slot else f"the {what} of '{self.path}'"

    def placement(self, at: str, side: str, slot: str, ndim: int) -> Placement | None:
        """The placement of a tensor in a slot; None if the plan has none.

        A list may have more elements than in the plan, if all have the same placement there. For a
        leaf module, the number of dims before the last may differ from the plan, if the plan shards
        none of them.
        """
        placed = self.tables[at, side]
        pattern = slot_pattern(slot)
        known = placed.get(slot, placed.get(pattern))
        if known is None:
            alike = [found for name, found in placed.items() if slot_pattern(name) == pattern]
            known = alike[0] if alike and all(found == alike[0] for found in alike) else {}
        if ndim in known or not self.leaf or ndim < 1:
            return known.get(ndim)
        found = {
            Placement((*[Atom(None)] * (ndim - 1), p.dims[-1]), p.partial, p.grad_partial)
            for p in known.values()
            if all(d == Atom(None) for d in p.dims[:-1])
        }
        return found.pop() if len(found) == 1 else None

    def gradients_as(self, grads: Sequence[Any], side: str, full: bool) -> tuple[Any, ...]:
        """Gradients of arguments ("in") or outputs ("out"): gathered (`full`), or sharded again."""
        if side == "in":
            slots = self.names(tuple(grads))
        elif len(grads) == 1 and "" in self.tables[AROUND, "out"]:
            slots = [""]
        else:
            slots = [str(i) for i in range(len(grads))]  # torch passes outputs as a tuple
        pairs = zip(grads, slots, strict=True)
        return tuple(g if g is None else self._gradient(g, side, slot, full) for g, slot in pairs)

    def _gradient(self, grad: Tensor, side: str, slot: str, full: bool) -> Tensor:
        """Convert a gradient, by the backward pass of the opposite redistribution."""
        reshard = self.reshard(AROUND, side, not full, slot, grad)
        if reshard is None or not reshard.steps:
            return grad
        coords, sizes = self.mesh.coords, []
        dims = zip(reshard.source.dims, reshard.target.dims, grad.shape, strict=True)
        for source, target, size in dims:  # a run-time size that is sharded is found by the forward
            whole = dim_size(resolve(target, size, coords))
            sizes.append(dim_size(resolve(source, whole or 0), coords) or 0)
        with torch.enable_grad():
            # Integer tensors get gradients from torch, too: integer zeros.
            real = grad if grad.is_floating_point() or grad.is_complex() else grad.float()
            near = real.new_zeros(sizes).requires_grad_()
            far = reshard(near)
        (found,) = torch.autograd.grad(far, near, real, create_graph=torch.is_grad_enabled())
        return found.to(grad.dtype)


def table(placed: Iterable[tuple[str, str]]) -> Table:
    """Parse pairs of slot and placement."""
    out: Table = {}
    for slot, text in placed:
        placement = parse(text)
        out.setdefault(slot, {})[len(placement.dims)] = placement
    return out


def _is_among(found: frozenset[str], side: str, slot: str) -> bool:
    return any(f"{side} {name}".rstrip() in found for name in (slot, slot_pattern(slot)))


def _shares_memory(out: Tensor, x: Tensor) -> bool:
    """Whether `out` may share memory with `x`, or is a view for autograd."""
    if torch.compiler.is_compiling() or (out.requires_grad and out._is_view()):
        return True
    return out.untyped_storage()._cdata == x.untyped_storage()._cdata


class _NoGradient(torch.autograd.Function):
    """Identity for a tensor that had no gradient in any call of the plan: refuses one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:  # type: ignore[override]
        """Return a view of the tensor."""
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """Refuse the gradient."""
        raise UsageError(
            f"a backward pass reached {ctx.name}, which had no gradient in any call that the plan "
            "was made for, so a rank may have only one term of its gradient: detach the tensor "
            "there, or plan with example inputs for which it has a gradient"
        )
