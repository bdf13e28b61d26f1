"""Finds the steps of a redistribution: which transitions, over which mesh axes, in which order.

The runtime carries them out, and reports name their collectives. Sub-axes of one mesh dim with the
same transition share one collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import (
    MAX_PIECES,
    Dim,
    covered,
    dim_size,
    local_ranges,
    only,
    pieces,
    simplify,
)
from shardwright.planner.contract.mesh import Coords, mesh_dim_of, sub_axes_of, together
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.transitions import Kind, Transition, kind_of, route


class Step(NamedTuple):
    """One transition over the mesh axis `mesh`.

    `dim` is the tensor dimension that the axis shards before or after the step, and `layout` is its
    layout on this rank (see `only`). Both are None if the axis shards nothing.
    """

    mesh: str
    transition: Transition
    dim: int | None = None
    layout: Dim | None = None


@dataclass(frozen=True)
class Side:
    """A placement's kind on one sub-axis, and the mesh axis that shards it there."""

    kind: Kind
    mesh: str = ""


def side(placement: Placement, bit: str, coords: Coords) -> Side:
    """Return the kind of `placement` on one sub-axis, or on a mesh dim without sub-axes.

    Raises:
        PlanError: the placement contradicts itself.
    """
    sharding = [
        (d, m)
        for d in placement.dims
        for m in Placement((d,)).meshes
        if bit in sub_axes_of(m, coords)
    ]
    flagged = any(bit in sub_axes_of(m, coords) for m in placement.grad_partial)
    partial = any(bit in sub_axes_of(m, coords) for m in placement.partial)
    if len(sharding) > 1 or (sharding and partial):
        raise PlanError(f"placement '{placement}' uses mesh dim {bit} twice")
    if flagged and partial:
        raise PlanError(f"placement '{placement}' is both partial and grad-partial over {bit}")
    if not sharding:
        return Side(kind_of(False, False, partial, flagged))
    ((dim, name),) = sharding
    return Side(kind_of(True, covered(dim, name), False, flagged), name)


def steps(source: Placement, target: Placement, coords: Coords) -> list[Step]:
    """Return the steps from `source` to `target`: unshard the source, then shard the target.

    Changes between Partial and Replicate happen while the tensor is sharded most.

    Args:
        source: The placement before.
        target: The placement after, of the same unsharded shape.
        coords: This rank's coordinates on every mesh dim and sub-axis.

    Raises:
        PlanError: no transitions lead from one to the other, or one contradicts itself.
    """
    return list(_steps(source, target, tuple(coords.items())))


@lru_cache(maxsize=1 << 12)
def _steps(
    source: Placement, target: Placement, at: tuple[tuple[str, tuple[int, int]], ...]
) -> tuple[Step, ...]:
    coords = dict(at)
    changes = _changes(source, target, coords)
    same = {
        a.mesh
        for _, a, b in changes
        if a.mesh and a.mesh == b.mesh and _same_shards(source, target, a.mesh, coords)
    }
    leave: list[Step] = []
    enter: list[Step] = []
    flags: list[Step] = []
    still, already = set(source.meshes), set(same & target.meshes)
    for mesh, a, b in changes:
        if a.mesh in same or not (a.mesh or b.mesh):
            held = _sharded(source, mesh, coords, still) if a.mesh else (None, None)
            flags += _route(mesh, a.kind, b.kind, *held)
            continue
        between = b.kind
        if a.mesh:
            if b.mesh:  # the axis shards other indices afterwards: unshard in between
                between = Kind.GRAD_PARTIAL if a.kind == Kind.SHARD else Kind.REPLICATE
            leave += _route(mesh, a.kind, between, *_sharded(source, mesh, coords, still))
            still.discard(mesh)
        if b.mesh:
            before = between if a.mesh else a.kind
            enter += _route(mesh, before, b.kind, *_sharded(target, mesh, coords, already))
            already.add(mesh)
    return (*leave, *enter, *flags) if enter else (*flags, *leave)


def _changes(source: Placement, target: Placement, coords: Coords) -> list[tuple[str, Side, Side]]:
    """Return the mesh axes over which the kind may change, with the sides before and after.

    Raises:
        PlanError: the sub-axes of a mesh axis that shards a tensor have different transitions.
    """
    found: dict[tuple[str, Side, Side], list[str]] = {}
    for bit in sorted(set().union(*(sub_axes_of(m, coords) for m in source.named | target.named))):
        sides = side(source, bit, coords), side(target, bit, coords)
        found.setdefault((mesh_dim_of(bit), *sides), []).append(bit)
    out = []
    for (_, a, b), bits in found.items():
        if any(s.mesh and sub_axes_of(s.mesh, coords) != set(bits) for s in (a, b)):
            raise PlanError(
                f"resharding from '{source}' to '{target}' is not supported: the sub-axes "
                f"{' '.join(bits)} change otherwise than the rest of their mesh dim"
            )
        out.append((together(bits, coords), a, b))
    return sorted(out, key=lambda change: change[0])


def _route(mesh: str, a: Kind, b: Kind, dim: int | None, layout: Dim | None) -> list[Step]:
    found = route(a, b)
    if found is None:
        raise PlanError(
            f"resharding from {a} to {b} is not supported: place the redistribution elsewhere"
        )
    return [Step(mesh, transition, dim, layout) for transition in found]


def _sharded(
    placement: Placement, mesh: str, coords: Coords, active: set[str]
) -> tuple[int | None, Dim | None]:
    """Return the tensor dimension that `mesh` shards, and its layout local to `active` axes."""
    for i, dim in enumerate(placement.dims):
        if mesh in Placement((dim,)).meshes:
            return i, only(dim, mesh, coords, active)
    return None, None


def _same_shards(source: Placement, target: Placement, mesh: str, coords: Coords) -> bool:
    """Return whether both placements give each rank along `mesh` the same indices."""
    ranks = coords[mesh][1]
    pairs = zip(source.dims, target.dims, strict=True)
    return all(_same_dim(a, b, mesh, ranks) for a, b in pairs)


def _same_dim(a: Dim, b: Dim, mesh: str, ranks: int) -> bool:
    a, b = only(a, mesh, {}, ()), only(b, mesh, {}, ())
    if mesh not in Placement((a, b)).meshes or a == b or simplify(a) == simplify(b):
        return True
    if dim_size(a) is None or dim_size(b) is None:
        return False
    if max(pieces(a), pieces(b)) * ranks > MAX_PIECES:
        raise PlanError(f"'{a}' and '{b}' are too finely split to be compared")
    coords = [{mesh: (rank, ranks)} for rank in range(ranks)]
    return all(local_ranges(a, c) == local_ranges(b, c) for c in coords)
