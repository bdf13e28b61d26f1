"""Redistributes local tensors between two placements, forward and backward.

`planner/contract/redistribution_steps.py` determines the steps, from the table in `transitions.py`.
Those of a sharded dim are in `split.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import is_split, local_ranges
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.redistribution_steps import Step, steps
from shardwright.runtime.communication.collectives import all_reduce
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.redistribution.lengths import Length
from shardwright.runtime.redistribution.overlap import overlaps, summed_behind, writable
from shardwright.runtime.redistribution.split import ACTIONS, Split, select


@dataclass(frozen=True, eq=False)
class Operation:
    """One step of a redistribution over the ranks of one mesh axis.

    `forward` and `backward` are action names, as text, which torch.compile can trace.
    """

    group: Group
    forward: str
    backward: str
    split: Split | None = None
    length: Length | None = None

    @classmethod
    def of(cls, step: Step, mesh: Mesh, length: Length | None) -> Operation:
        """Return the operation of `step` on this rank of `mesh`."""
        group, split = mesh[step.mesh], None
        if step.dim is not None and step.layout is not None:
            split = Split.of(group, step.mesh, step.dim, step.layout)
        forward, backward, _ = step.transition
        return cls(group, forward.name, backward.name, split, length)

    def note_or_find_size(self, x: Tensor) -> int | None:
        """Return the full length of the run-time axis that is split or gathered, if known.

        A step that splits it notes the length, which `x` shows; one that gathers it finds it there.
        """
        assert self.split is not None
        size, gathers = self.split.size_in(x), self.forward not in ("take", "reduce_scatter")
        if self.length is None:
            return None if gathers else size
        if gathers:
            return self.length.find(size, self.group)
        self.length.note(size)
        return size

    def run(self, op: str, x: Tensor, size: int | None) -> Tensor:
        """Run the action `op` on `x`; `size` is a run-time size that `x` may not show."""
        if op == "identity":
            return x
        if op == "all_reduce":
            return all_reduce(x, self.group)
        if op == "keep_first":
            return x if self.group.rank == 0 else torch.zeros_like(x)
        assert self.split is not None
        return ACTIONS[op](self.split, x, size)

    def without_gradient(self, spent: bool) -> Callable[[Tensor], Tensor] | None:
        """Return the step for code without gradients, or None; `spent` as in `all_reduce`."""
        static = self.split is None or self.split.static
        if self.group.size == 1 or (self.forward == "identity" and static):
            return None
        if self.forward == "all_reduce":
            return partial(all_reduce, group=self.group, spent=spent)
        if static and self.split is not None and self.forward in ACTIONS:
            return MethodType(ACTIONS[self.forward], self.split)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Redistribute `x` to the step's target; differentiable."""
        if self.group.size == 1:
            return x
        size = None if self.split is None or self.split.static else self.note_or_find_size(x)
        if torch.is_grad_enabled() and x.requires_grad:
            sums_behind = (self.forward, self.backward) == ("identity", "all_reduce")
            if sums_behind and overlaps(x, self.group):
                return summed_behind(x, self.group, self.back)
            return _Redistribute.apply(x, self, size, self.forward, self.backward)
        return self.run(self.forward, x, size)

    def back(self, grad: Tensor, size: int | None = None) -> Tensor:
        """Redistribute the gradient to the step's source; differentiable."""
        return _Redistribute.apply(grad, self, size, self.backward, self.forward)


class _Redistribute(torch.autograd.Function):
    """Runs the action `there` of a step; the gradient is its action `back`.

    Both are linear. The gradient of the gradient is therefore `there` again: it is laid out as the
    input of `there` is, and as a tangent of that would be. The collectives' own derivatives would
    be different.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, step: Operation, size: int | None, there: str, back: str
    ) -> Tensor:
        """Redistribute `x` to the target of the step, or a gradient to its source."""
        ctx.step, ctx.size, ctx.there, ctx.back = step, size, there, back
        out = step.run(there, x, size)
        return out.view_as(out) if out is x else writable(out, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the gradient of `x`."""
        if torch.is_grad_enabled():  # the gradient may be differentiated again
            out = _Redistribute.apply(grad, ctx.step, ctx.size, ctx.back, ctx.there)
        else:
            out = ctx.step.run(ctx.back, grad, ctx.size)
        return out, None, None, None, None


class Reshard:
    """Redistributes from placement `source` to `target`: built once, called on local tensors.

    Args:
        source: placement of the input.
        target: placement of the output; the full shape must be the same.
        mesh: this rank's mesh.
        length: the length of the split axis of run-time size, if there is one.

    Raises:
        PlanError: the shapes differ, the redistribution is not supported, or a run-time axis would
            be gathered without a `length`.
    """

    def __init__(
        self, source: Placement, target: Placement, mesh: Mesh, length: Length | None = None
    ) -> None:
        if source.shape != target.shape:
            raise PlanError(f"cannot reshard '{source}' to '{target}': the whole shapes differ")
        self.source, self.target = source, target
        for name in sorted(source.named | target.named):
            mesh[name]  # raises if the mesh has no such dim
        self.steps = tuple(
            Operation.of(step, mesh, length) for step in steps(source, target, mesh.coords)
        )
        for step in self.steps:
            open_size = step.split is not None and not step.split.static
            if length is None and open_size and step.forward in ("all_gather", "pad"):
                raise PlanError(
                    f"a part laid out as '{source}' does not show how long the whole is: the "
                    "redistribution must name its `length`"
                )
        self.shape = source.local_shape(mesh.coords)
        """Local shape of the input, with None for run-time sizes."""
        self.known = tuple((dim, n) for dim, n in enumerate(self.shape) if n is not None)
        self.forward, self.spent = (
            tuple(filter(None, (step.without_gradient(spent) for step in self.steps)))
            for spent in (False, True)
        )
        """The steps without gradients: those that act only in backward are left out. The second
        version is for an input that is no longer needed."""

    def __call__(self, x: Tensor) -> Tensor:
        """Redistribute `x`, which has the source's local shape, to the target's.

        Raises:
            PlanError: `x` cannot be a local tensor of the source placement.
        """
        if not self.forward and torch.is_grad_enabled() and not x.requires_grad:
            return x  # it acts only in backward (dry runs, without gradients, check the shape)
        fits = x.dim() == len(self.shape)
        for dim, size in self.known:
            fits = fits and x.shape[dim] == size
        if not fits:
            wanted = ", ".join("?" if n is None else str(n) for n in self.shape)
            raise PlanError(
                f"a tensor laid out as '{self.source}' should have shape [{wanted}] here, "
                f"not {list(x.shape)}"
            )
        for step in self.steps if torch.is_grad_enabled() else self.forward:
            x = step(x)
        return x

    def __repr__(self) -> str:
        ops = ", ".join(f"{s.forward} / {s.backward}" for s in self.steps) or "nothing"
        return f"Reshard({self.source} -> {self.target}: {ops})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Reshard:
        return self


class ByDims:
    """Reshards by number of dims, for tensors whose number of dims varies."""

    def __init__(self, reshards: Mapping[int, Reshard]) -> None:
        self.reshards = dict(reshards)

    def __call__(self, x: Tensor) -> Tensor:
        """Redistribute `x`.

        Raises:
            PlanError: there is no reshard for its number of dims, or its shape does not fit.
        """
        if x.dim() not in self.reshards:
            known = " or ".join(map(str, sorted(self.reshards)))
            raise PlanError(f"a tensor should have {known} dims here, not {x.dim()}")
        return self.reshards[x.dim()](x)

    def __repr__(self) -> str:
        return f"ByDims({', '.join(map(repr, self.reshards.values()))})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ByDims:
        return self


def last_dim(source: str, target: str, mesh: Mesh) -> ByDims:
    """Return reshards of the last dim of tensors with up to six dims.

    All are built now: a compiled forward only picks one.

    Args:
        source: The last dim and flags before, as text: "8@tp", "64 | partial tp".
        target: The last dim and flags after.
        mesh: This rank's mesh.
    """
    ends = ((parse("?, " * n + source), parse("?, " * n + target)) for n in range(6))
    return ByDims({len(before.dims): Reshard(before, after, mesh) for before, after in ends})


def gather_whole(x: Tensor, placement: Placement, mesh: Mesh) -> Tensor:
    """Return the full tensor, on every rank, of which this rank holds `x`; not differentiable."""
    rest = Placement(placement.dims, placement.partial)
    with torch.no_grad():
        return Reshard(rest, placement.replicated(), mesh)(x.detach())


def take_local(x: Tensor, placement: Placement, coords: Coords) -> Tensor:
    """Return the part of the full tensor `x` of the rank at `coords`; not differentiable.

    A part has memory of its own. If nothing is sharded, `x` is returned, detached.
    """
    whole = part = x.detach()
    for d, dim in enumerate(placement.dims):
        part = select(part, d, local_ranges(dim, coords)) if is_split(dim) else part
    return part if part is whole else part.clone(memory_format=torch.contiguous_format)
