"""Changing a tensor's placement: the collectives between two placements, both ways.

On each mesh dim (or sub-axis of one) a tensor is in one of six states. A crossing from one state to
another is a pair of operations, forward and backward; they are the table `CROSSINGS`. The reverse
crossing of the gradient is the same table read the other way: the gradient of a partial value is
replicated and that of a grad-partial one is partial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import Dim, dim_size, simplify
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.ranges import local_ranges
from shardwright.runtime.collectives import all_reduce
from shardwright.runtime.lengths import Length
from shardwright.runtime.mesh import Group, Mesh, bits_of, mesh_dim_of, together
from shardwright.runtime.split import Split, covered, only


class State(StrEnum):
    """What a rank holds of a tensor, as far as one mesh dim goes."""

    REPLICATED = "replicated"
    PARTIAL = "partial"
    GRAD_PARTIAL = "grad-partial"
    SHARDED = "sharded"
    MIXED = "sharded in parts"
    MIXED_GRAD_PARTIAL = "sharded in parts, grad-partial elsewhere"


_R, _P, _G, _S, _M, _MG = State

CROSSINGS: dict[tuple[State, State], tuple[str, str]] = {
    # from, to: forward, backward
    (_R, _P): ("keep_first", "identity"),
    (_R, _G): ("identity", "all_reduce"),
    (_R, _S): ("take", "gather"),
    (_R, _M): ("take", "gather"),
    (_P, _R): ("all_reduce", "identity"),
    (_P, _G): ("all_reduce", "all_reduce"),
    (_P, _S): ("reduce_scatter", "gather"),
    (_G, _R): ("identity", "keep_first"),
    (_G, _P): ("keep_first", "keep_first"),
    (_G, _S): ("take", "pad"),
    (_G, _MG): ("take", "pad"),
    (_S, _R): ("gather", "take"),
    (_S, _P): ("pad", "take"),
    (_S, _G): ("gather", "reduce_scatter"),
    (_M, _R): ("gather", "take"),
    (_M, _MG): ("identity", "reduce_shared"),
}


@dataclass(frozen=True, eq=False)
class Step:
    """One crossing on one mesh dim."""

    group: Group
    forward: str
    backward: str
    split: Split | None = None
    length: Length | None = None

    def size(self, x: Tensor) -> int | None:
        """The whole length of a run-time axis that this step splits or gathers; else None."""
        if self.split is None or self.split.static:
            return None
        if self.forward in ("take", "reduce_scatter"):
            size = self.split.whole_size(x)
            assert size is not None
            if self.length is not None:
                self.length.note(size)
            return size
        if self.length is None:
            return None
        return self.length.find(self.split.own_size(x), self.group)

    def run(self, op: str, x: Tensor, size: int | None) -> Tensor:
        """`op` on `x`; `size` is a run-time size that `x` need not show."""
        if op == "identity":
            return x
        if op == "all_reduce":
            return all_reduce(x, self.group)
        if op == "keep_first":
            return x if self.group.rank == 0 else torch.zeros_like(x)
        assert self.split is not None
        return getattr(self.split, op)(x, size)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` at the other side; differentiable."""
        if self.group.size == 1:
            return x
        size = self.size(x)
        if torch.is_grad_enabled() and x.requires_grad:
            return _Cross.apply(x, self, size)
        return self.run(self.forward, x, size)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return self


class _Cross(torch.autograd.Function):
    """A step with the backward operation that its states ask for."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, step: Step, size: int | None
    ) -> Tensor:
        """`x` at the other side of the step."""
        ctx.step, ctx.size = step, size
        out = step.run(step.forward, x, size)
        return out.view_as(out) if out is x else out

    @staticmethod
    @once_differentiable  # what the collectives' own derivatives would say is another thing
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """The gradient at this side."""
        return ctx.step.run(ctx.step.backward, grad, ctx.size), None, None


class Reshard:
    """From placement `source` to placement `target`: compiled once, called on local tensors.

    Args:
        source: placement of what comes in.
        target: placement of what goes out; the same whole shape.
        mesh: where this rank stands.
        length: what knows the length of the axis of run-time size that is split, if one is.

    Raises:
        PlanError: the shapes differ, or no way between the two is supported; a run-time axis would
            be gathered and nothing knows how long it is.
    """

    def __init__(
        self, source: Placement, target: Placement, mesh: Mesh, length: Length | None = None
    ) -> None:
        if source.shape != target.shape:
            raise PlanError(f"cannot reshard '{source}' to '{target}': the whole shapes differ")
        self.source, self.target = source, target
        self.steps = tuple(replace(s, length=length) for s in _steps(source, target, mesh))
        for step in self.steps:
            open_size = step.split is not None and not step.split.static
            if length is None and open_size and step.forward in ("gather", "pad"):
                raise PlanError(
                    f"a part laid out as '{source}' does not show how long the whole is: the "
                    "crossing must name its `length`"
                )
        self._sizes = source.local_shape(mesh.coords)

    def __call__(self, x: Tensor) -> Tensor:
        """Cross with `x`, of the source's local shape, to the target's."""
        self.check(x)
        for step in self.steps:
            x = step(x)
        return x

    def check(self, x: Tensor) -> None:
        """Raise PlanError if `x` cannot be a local tensor of the source placement."""
        fits = x.dim() == len(self._sizes)
        for size, known in zip(x.shape, self._sizes, strict=False):
            fits = fits and (known is None or size == known)
        if not fits:
            wanted = ", ".join("?" if n is None else str(n) for n in self._sizes)
            raise PlanError(
                f"a tensor laid out as '{self.source}' should have shape [{wanted}] here, "
                f"not {list(x.shape)}"
            )

    def __repr__(self) -> str:
        ops = ", ".join(f"{s.forward} / {s.backward}" for s in self.steps) or "nothing"
        return f"Reshard({self.source} -> {self.target}: {ops})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Reshard:
        return self


class ByDims:
    """Reshards of tensors that differ in their number of dims, by that."""

    def __init__(self, reshards: Mapping[int, Reshard]) -> None:
        self.reshards = dict(reshards)

    def __call__(self, x: Tensor) -> Tensor:
        """Cross with `x`.

        Raises:
            PlanError: no reshard is for its number of dims, or its shape is not that one's.
        """
        if x.dim() not in self.reshards:
            known = " or ".join(map(str, sorted(self.reshards)))
            raise PlanError(f"a tensor should have {known} dims here, not {x.dim()}")
        return self.reshards[x.dim()](x)

    def __repr__(self) -> str:
        return f"ByDims({', '.join(map(repr, self.reshards.values()))})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ByDims:
        return self


class LastDim:
    """A reshard of the last dimension, whatever dimensions come before it.

    Args:
        source: the last dim and flags before, as text: "8@tp", "64 | partial tp".
        target: the same after.
        mesh: where this rank stands.
    """

    MOST = 6

    def __init__(self, source: str, target: str, mesh: Mesh) -> None:
        # All of them now: a compiled forward only picks one.
        self.by_rank = tuple(
            Reshard(parse("?, " * n + source), parse("?, " * n + target), mesh)
            for n in range(self.MOST)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Cross with `x`, whatever its number of dimensions."""
        return self.by_rank[x.dim() - 1](x)

    def __repr__(self) -> str:
        return repr(self.by_rank[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> LastDim:
        return self


def gather_whole(x: Tensor, placement: Placement, mesh: Mesh) -> Tensor:
    """The whole tensor, on every rank, of which this rank holds `x`; not differentiable."""
    rest = Placement(placement.dims, placement.partial)
    with torch.no_grad():
        return Reshard(rest, placement.replicated(), mesh)(x.detach())


def take_local(x: Tensor, placement: Placement, mesh: Mesh) -> Tensor:
    """What this rank holds of the whole tensor `x`; not differentiable, no communication."""
    rest = Placement(placement.dims, placement.partial)
    with torch.no_grad():
        return Reshard(placement.replicated(), rest, mesh)(x.detach())


@dataclass(frozen=True)
class Side:
    """What a placement is on one sub-axis, and the name of the mesh dim that splits it there."""

    state: State
    name: str = ""


def side(placement: Placement, bit: str, mesh: Mesh) -> Side:
    """What `placement` is on one sub-axis (or on a mesh dim that has none).

    Raises:
        PlanError: the placement contradicts itself.
    """
    splitting = [
        (d, m) for d in placement.dims for m in Placement((d,)).meshes if bit in bits_of(m, mesh)
    ]
    flagged = any(bit in bits_of(m, mesh) for m in placement.grad_partial)
    partial = any(bit in bits_of(m, mesh) for m in placement.partial)
    if len(splitting) > 1 or (splitting and partial):
        raise PlanError(f"placement '{placement}' uses mesh dim {bit} twice")
    if flagged and partial:
        raise PlanError(f"placement '{placement}' is both partial and grad-partial over {bit}")
    if partial:
        return Side(State.PARTIAL)
    if not splitting:
        return Side(State.GRAD_PARTIAL if flagged else State.REPLICATED)
    ((dim, name),) = splitting
    if covered(dim, name):
        return Side(State.SHARDED, name)  # a flag speaks of uncovered parts; there are none
    return Side(State.MIXED_GRAD_PARTIAL if flagged else State.MIXED, name)


def _units(source: Placement, target: Placement, mesh: Mesh) -> list[tuple[str, Side, Side]]:
    """The mesh dims on which something may change: sub-axes that do the same do it together.

    Raises:
        PlanError: some sub-axes of a mesh dim that splits a tensor do another thing than the rest.
    """
    named = source.meshes | target.meshes
    named |= {*source.partial, *source.grad_partial, *target.partial, *target.grad_partial}
    found: dict[tuple[str, Side, Side], list[str]] = {}
    for bit in sorted(set().union(*(bits_of(m, mesh) for m in named))):
        sides = side(source, bit, mesh), side(target, bit, mesh)
        found.setdefault((mesh_dim_of(bit), *sides), []).append(bit)
    out = []
    for (_, a, b), bits in found.items():
        if any(s.name and bits_of(s.name, mesh) != set(bits) for s in (a, b)):
            raise PlanError(
                f"resharding from '{source}' to '{target}' is not supported: it does one thing "
                f"over {' '.join(bits)} and another over the rest"
            )
        out.append((together(bits, mesh), a, b))
    return sorted(out, key=lambda unit: unit[0])


def _steps(source: Placement, target: Placement, mesh: Mesh) -> list[Step]:
    """Leave the source's shards first, then enter the target's: trees need not match between.

    What changes in pending sums alone does so while the tensor is split the most.
    """
    units = _units(source, target, mesh)
    same = {
        a.name
        for _, a, b in units
        if a.name and a.name == b.name and _same_shards(source, target, a.name, mesh)
    }
    leave: list[Step] = []
    enter: list[Step] = []
    flags: list[Step] = []
    still, already = set(source.meshes), set(same & target.meshes)
    for m, a, b in units:
        if a.name in same or not (a.name or b.name):
            split = _split(source, m, mesh, frozenset(still)) if a.name else None
            flags += _route(a.state, b.state, mesh[m], split)
            continue
        between = b.state
        if a.name:
            if b.name:  # another index set on the same mesh dim: through the whole
                between = _G if a.state == _S else _R
            split = _split(source, m, mesh, frozenset(still))
            leave += _route(a.state, between, mesh[m], split)
            still.discard(m)
        if b.name:
            split = _split(target, m, mesh, frozenset(already))
            enter += _route(between if a.name else a.state, b.state, mesh[m], split)
            already.add(m)
    return [*leave, *enter, *flags] if enter else [*flags, *leave]


def _route(a: State, b: State, group: Group, split: Split | None) -> list[Step]:
    """The steps from one state to another: the table's entry, or by way of a whole value."""
    if a == b:
        return []
    if (a, b) in CROSSINGS:
        return [Step(group, *CROSSINGS[a, b], split)]
    for between in (_G, _R):
        if (a, between) in CROSSINGS and (between, b) in CROSSINGS:
            return [Step(group, *CROSSINGS[pair], split) for pair in ((a, between), (between, b))]
    raise PlanError(f"resharding from {a} to {b} is not supported: place the crossing elsewhere")


def _split(placement: Placement, m: str, mesh: Mesh, active: frozenset[str]) -> Split | None:
    for i, dim in enumerate(placement.dims):
        if m in Placement((dim,)).meshes:
            return Split.of(mesh[m], m, i, only(dim, m, mesh.coords, active))
    return None


def _same_shards(source: Placement, target: Placement, m: str, mesh: Mesh) -> bool:
    """Whether both placements give each rank of mesh dim `m` the same indices."""
    ranks = mesh[m].size
    pairs = zip(source.dims, target.dims, strict=True)
    return all(_same_dim(a, b, m, ranks) for a, b in pairs)


def _same_dim(a: Dim, b: Dim, m: str, ranks: int) -> bool:
    a, b = only(a, m, {}, frozenset()), only(b, m, {}, frozenset())
    if m not in Placement((a, b)).meshes or a == b or simplify(a) == simplify(b):
        return True
    if dim_size(a) is None or dim_size(b) is None:
        return False
    coords = [{m: (rank, ranks)} for rank in range(ranks)]
    return all(local_ranges(a, c) == local_ranges(b, c) for c in coords)
