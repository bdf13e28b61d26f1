"""Layouts of SplitTensors: converts a plan's placements to torch's, gathers and shards tensors.

The DeviceMesh of parameters has a dim for `ep`, if the mesh has it, and for each sub-axis of tp;
FSDP2 puts its own dims in front. A dim of a tensor is first sharded over ep and tp, as the plan
says, and then over FSDP2's dims, as `torch.chunk` does. This determines which indices of a dim a
rank holds. Gathering and sharding follow from these indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.dims import Atom, Dim, Range, atoms, local_ranges
from shardwright.planner.contract.mesh import (
    EP,
    TP,
    Coords,
    coords_of,
    mesh_dim_of,
    sub_axes_of,
    together,
    with_sub_axes,
)
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.communication.collectives import all_gather
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.redistribution.split import indices, select

PLANNED = (EP, TP)
"""The mesh dims over which a plan shards parameters."""


class PlannedShard(_StridedShard):
    """A placement that shards a dim by the plan's `layout`, where `torch.chunk` would differ.

    Examples are the rows of a fused weight (rank 0 has its shard of q, of k and of v), three heads
    on two ranks, and heads that ranks share. `layout` covers all dims, ep and all sub-axes of tp.

    The class derives from torch's placement for shards in another order. Torch then takes it
    neither for a `Shard` nor for replicated, and reads `split_factor`, which raises.
    """

    layout: str

    def __init__(self, dim: int, layout: str) -> None:
        super().__init__(dim)
        self.layout = layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlannedShard) and self.__reduce__() == other.__reduce__()

    def __ne__(self, other: object) -> bool:  # torch's compares only the dim
        return not self == other

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def __repr__(self) -> str:
        return f"PlannedShard(dim={self.dim}, layout={self.layout!r})"

    __str__ = __repr__

    def __copy__(self) -> PlannedShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedShard:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedShard, (self.dim, self.layout)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"a tensor of a split model laid out as '{self.layout}', which torch's own code cannot "
            "shard: take it in full with shardwright.full_tensors(model, {name: tensor})"
        )

    split_factor: Any = property(_refuse)
    _split_tensor = _select_split_tensor = _shard_tensor = _split_factor_int = _refuse
    _to_replicate_tensor = _replicate_to_strided_shard = _refuse
    _local_shard_size_and_offset = local_shard_size_and_offset = __fx_repr__ = _refuse


# From a plan's placement to torch's.


def placements_of(placement: Placement, mesh: Mesh) -> tuple[Shard | Replicate, ...]:
    """Convert a plan's placement to torch's placements over the sub-axes of tp, in their order.

    Raises:
        PlanError: the placement shards two dims over one sub-axis.
    """
    names, coords = tuple(axes_of(mesh)), coords_of_all(mesh)
    shape = tuple(n or 0 for n in placement.shape)
    sizes = tuple(coords[0][name][1] for name in names)
    out: list[Any] = []
    for name in names:
        split = [d for d, dim in enumerate(placement.dims) if _is_split_over(dim, name, coords[0])]
        if len(split) > 1:
            raise PlanError(f"'{placement}' splits two dims over {name}")
        out.append(Shard(split[0]) if split else Replicate())
    for dim in {p.dim for p in out if not p.is_replicate()}:
        chunks = DimShards.of(dim, shape, tuple(out), names, sizes)._replace(layout=None)
        given = sorted(name for name, p in zip(names, out, strict=True) if p == Shard(dim))
        mixed = len({mesh_dim_of(name) for name in given}) > 1  # experts, and rows of each
        ours = Atom(shape[dim], together(given[-1:] if mixed else given, coords[0]))
        for at in coords:
            planned = local_ranges(placement.dims[dim], at)
            chunked = chunks.held([at[name][0] for name in names])
            # A plain Shard must also be the even shard of the plan's own rules.
            if mixed or not planned == chunked == local_ranges(ours, at):
                layout = str(Placement(placement.dims))
                out = [PlannedShard(dim, layout) if p == Shard(dim) else p for p in out]
                break
    return tuple(out)


def axes_of(mesh: Mesh) -> list[str]:
    """The names of the mesh dims of parameters: ep, and the sub-axes of tp or tp itself."""
    dims = [name for name in mesh.coords if name in PLANNED]
    return [axis for dim in dims for axis in sorted(sub_axes_of(dim, mesh.coords))]


def coords_of_all(mesh: Mesh) -> list[Coords]:
    """The coordinates of each rank of ep and tp, by rank."""
    sub_axes = {TP: mesh.sub_axes[TP]} if TP in mesh.sub_axes else {}
    dims = {name: mesh[name].size for name in mesh.coords if name in PLANNED}
    return [coords_of(dims, sub_axes, rank) for rank in range(prod(dims.values()))]


def _is_split_over(dim: Dim, axis: str, coords: Coords) -> bool:
    return any(a.mesh and axis in sub_axes_of(a.mesh, coords) for a in atoms(dim))


# The indices of a dim that each rank holds.


class DimShards(NamedTuple):
    """How one dim of a tensor is sharded over the ranks of a DeviceMesh."""

    size: int
    layout: str | None
    """The plan's layout, if `torch.chunk` over tp would differ from it."""
    dim: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    split: tuple[int, ...]
    """The mesh dims that shard this dim, in that order."""

    @classmethod
    def of(
        cls,
        dim: int,
        shape: Sequence[int],
        placements: tuple[Any, ...],
        names: tuple[str, ...],
        sizes: tuple[int, ...],
    ) -> DimShards:
        """The shards of dim `dim` of a tensor of `shape`."""
        layout = next((p.layout for p in placements if isinstance(p, PlannedShard)), None)
        split = [i for i, p in enumerate(placements) if not p.is_replicate() and p.dim == dim]
        split.sort(key=lambda i: mesh_dim_of(names[i]) not in PLANNED)
        return cls(shape[dim], layout, dim, names, sizes, tuple(split))

    def held(self, place: Sequence[int]) -> list[Range]:
        """The ranges of indices that the rank at `place` of the mesh holds, in ascending order."""
        ranges = [(0, self.size)] if self.size else []
        if self.layout is not None:
            ranges = local_ranges(parse(self.layout).dims[self.dim], self._coords(place))
        for i in self.split:
            if self.layout is None or mesh_dim_of(self.names[i]) not in PLANNED:
                ranges = _chunk(ranges, place[i], self.sizes[i])
        return ranges

    def _coords(self, place: Sequence[int]) -> Coords:
        mine = [i for i, name in enumerate(self.names) if mesh_dim_of(name) == TP]
        rank, ranks = 0, 1
        for i in mine:
            rank, ranks = rank * self.sizes[i] + place[i], ranks * self.sizes[i]
        sub_axes = {TP: [self.sizes[i] for i in mine]} if len(mine) > 1 else {}
        at = {TP: (rank, ranks)}
        if EP in self.names:
            i = self.names.index(EP)
            at[EP] = place[i], self.sizes[i]
        return with_sub_axes(at, sub_axes)

    def places(self, place: Sequence[int], over: Iterable[int]) -> list[tuple[int, ...]]:
        """All mesh places that equal `place` except in mesh dims `over`, itself included."""
        over = {*over}
        every = [range(n) if i in over else [place[i]] for i, n in enumerate(self.sizes)]
        return list(product(*every))


def _chunk(ranges: Sequence[Range], rank: int, ranks: int) -> list[Range]:
    """The indices of `ranges` that `torch.chunk` gives to a rank."""
    share = -(-sum(stop - start for start, stop in ranges) // ranks)
    first, last, before, out = rank * share, (rank + 1) * share, 0, []
    for start, stop in ranges:
        a, b = max(start, start + first - before), min(stop, start + last - before)
        before += stop - start
        if a < b:
            out.append((a, b))
    return out


@lru_cache(maxsize=1 << 10)
def _indices(shards: DimShards, place: tuple[int, ...], over: tuple[int, ...]) -> Tensor:
    """The sorted indices that the ranks along mesh dims `over` of `place` hold together."""
    held = {r for at in shards.places(place, over) for r in shards.held(at)}
    return indices(held).unique()


@cache
def boundaries(shards: DimShards) -> frozenset[int]:
    """All indices at which the range of some rank begins or ends."""
    every = shards.places([0] * len(shards.sizes), range(len(shards.sizes)))
    return frozenset(n for place in every for held in shards.held(place) for n in held)


@lru_cache(maxsize=1 << 10)
def _counted(shards: DimShards, place: tuple[int, ...]) -> Tensor | None:
    """Positions of the indices that no earlier rank holds; None if these are all."""
    own, before = _indices(shards, place, ()), shards.places(place, shards.split)
    earlier = {r for at in before if at < place for r in shards.held(at)}
    new = ~torch.isin(own, indices(earlier))
    return None if bool(new.all()) else new.nonzero().flatten()


@lru_cache(maxsize=1 << 10)
def _joining(
    shards: DimShards, place: tuple[int, ...], over: tuple[int, ...], mesh_dim: int
) -> tuple[int, Tensor | None]:
    """How to join the shards along `mesh_dim`: rows to pad each to, and the rows to take then.

    The latter is None if the concatenated shards are the result.
    """
    along = shards.places(place, [mesh_dim])
    parts = [_indices(shards, at, over) for at in along]
    joined, most = _indices(shards, place, (*over, mesh_dim)), max(map(len, parts))
    rows = torch.empty_like(joined)
    for rank, part in enumerate(parts):
        rows[torch.searchsorted(joined, part)] = torch.arange(len(part)) + rank * most
    in_order = len(rows) == most * len(parts) and torch.equal(rows, torch.arange(len(rows)))
    return most, None if in_order else rows


# What follows from a DTensorSpec.


def shards_of(spec: DTensorSpec) -> list[DimShards]:
    """The `DimShards` of each dim that is sharded."""
    names, sizes = tuple(spec.mesh.mesh_dim_names or ()), tuple(spec.mesh.shape)
    return _shards(tuple(spec.shape), spec.placements, names, sizes)


@lru_cache(maxsize=1 << 10)
def _shards(
    shape: tuple[int, ...], placements: Any, names: tuple[str, ...], sizes: tuple[int, ...]
) -> list[DimShards]:
    every = (DimShards.of(dim, shape, placements, names, sizes) for dim in range(len(shape)))
    return [shards for shards in every if shards.split]


def place_of(spec: DTensorSpec) -> tuple[int, ...]:
    """The coordinates of this rank on the mesh."""
    place = spec.mesh.get_coordinate()
    assert place is not None, "a rank that holds a part is one of the mesh"
    return tuple(place)


def is_planned(spec: DTensorSpec) -> bool:
    """Whether a placement is a `PlannedShard`."""
    return any(isinstance(p, PlannedShard) for p in spec.placements)


def split_dims(spec: DTensorSpec) -> list[int]:
    """The mesh dims over which the tensor is sharded."""
    return [i for i, p in enumerate(spec.placements) if not p.is_replicate()]


def group_of(spec: DTensorSpec, mesh_dim: int) -> Group:
    """The group of ranks along a dim of the mesh."""
    return Group.of(spec.mesh.get_group(mesh_dim))


def gathered(local: Tensor, spec: DTensorSpec) -> Tensor:
    """All-gather the full tensor from `local`; all ranks call this. Not differentiable."""
    if local.is_meta:
        return local.new_empty(spec.shape)
    place = place_of(spec)
    for shards in shards_of(spec):
        over: tuple[int, ...] = ()
        for i in reversed(shards.split):
            most, rows = _joining(shards, place, over, i)
            part = local.movedim(shards.dim, 0)
            if len(part) < most:
                part = torch.cat([part, part.new_zeros(most - len(part), *part.shape[1:])])
            part = all_gather(part.contiguous(), group_of(spec, i)).flatten(0, 1)
            part = part if rows is None else part[rows.to(part.device)]
            local, over = part.movedim(0, shards.dim).contiguous(), (*over, i)
    return local


def cut(full: Tensor, spec: DTensorSpec) -> Tensor:
    """The local tensor of a `full` one, which may broadcast to the shape; no communication."""
    if spec.is_replicated():
        return full
    place, ahead = place_of(spec), len(spec.shape) - full.dim()
    for shards in shards_of(spec):
        dim = shards.dim - ahead
        if dim >= 0 and not full.shape[dim] == 1 != shards.size:
            full = select(full, dim, shards.held(place))
    return full


def counted_once(local: Tensor, spec: DTensorSpec) -> Tensor:
    """`local` without the indices that an earlier rank also holds, for sums over ranks."""
    place = place_of(spec)
    for shards in shards_of(spec):
        if (mine := _counted(shards, place)) is not None:
            local = local.index_select(shards.dim, mine.to(local.device))
    return local


def spec_of(local: Tensor, shape: Sequence[int], spec: DTensorSpec) -> DTensorSpec:
    """`spec` for a tensor of `shape`, with dense strides in the dim order of `local`."""
    shape = torch.Size(shape)
    stride: Any = local.stride() if local.shape == shape else _dense(shape, local)
    meta = TensorMeta(shape, stride, local.dtype)
    if spec.tensor_meta == meta:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


def _dense(shape: Sequence[int], like: Tensor) -> tuple[int, ...]:
    """The strides of a dense tensor of `shape` whose dims are in memory in the order of `like`."""
    order = list(range(len(shape)))
    if not like.is_contiguous():
        order.sort(key=lambda d: -like.stride(d))
    out, step = [0] * len(shape), 1
    for dim in reversed(order):
        out[dim], step = step, step * max(shape[dim], 1)
    return tuple(out)


def with_dims(spec: DTensorSpec, kept: Sequence[int | None], made: Tensor) -> DTensorSpec | None:
    """The spec of a view of a tensor, or None if the view does not keep all of each sharded dim.

    Args:
        spec: The spec of the tensor.
        kept: For each dim of the view, the dim of the tensor that it is all of, or None.
        made: The view of the local tensor.
    """
    placements: list[Any] = list(spec.placements)
    for i, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.dim not in kept:
            return None
        dim = kept.index(placement.dim)
        if isinstance(placement, PlannedShard):
            dims = parse(placement.layout).dims
            sizes = zip(kept, made.shape, strict=True)
            layout = Placement(tuple(Atom(n) if d is None else dims[d] for d, n in sizes))
            placements[i] = PlannedShard(dim, str(layout))
        elif type(placement) is Shard:
            placements[i] = Shard(dim)
        else:
            strided = cast(_StridedShard, placement)
            placements[i] = _StridedShard(dim, split_factor=strided.split_factor)
    shape = [n if d is None else spec.shape[d] for d, n in zip(kept, made.shape, strict=True)]
    return spec_of(made, shape, DTensorSpec(spec.mesh, tuple(placements)))
