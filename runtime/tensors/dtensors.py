"""Parameters of a split model as DTensors over its ranks, so that stock tools understand them.

A DTensor says how a parameter lies over the ranks: norms, clipping, optimizers, FSDP2 and
distributed checkpoints go by that. The mesh is one for all parameters, a dim for each sub-axis.
Modules go on computing on the local tensors (`runtime/modules/seen.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.dims import Atom, Concat, Dim, Product, atoms, local_ranges
from shardwright.planner.contract.mesh import TP, Coords, sub_axes_of, together, with_sub_axes
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.communication.collectives import all_gather
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.redistribution.reshard import take_local
from shardwright.runtime.tensors.arranged import Arranged


def placements_of(placement: Placement, mesh: Mesh) -> tuple[Shard | Replicate, ...]:
    """How torch says `placement` for the sub-axes of tp, in their order."""
    every = coords_of_all(mesh)
    out: list[Shard | Replicate] = []
    for axis in axes_of(mesh):
        split = [d for d, dim in enumerate(placement.dims) if _named(dim, axis, every[0])]
        if len(split) > 1:
            raise PlanError(f"'{placement}' splits two dims over {axis}")
        out.append(Shard(split[0]) if split else Replicate())
    for dim in {p.dim for p in out if isinstance(p, Shard)}:
        if not _as_torch(placement, dim, out, mesh, every):
            layout = str(placement)
            for i, axis in enumerate(axes_of(mesh)):
                if out[i] == Shard(dim):
                    shared = not _covers(placement.dims[dim], axis, every[0])
                    out[i] = Arranged(dim, layout, shared)
    return tuple(out)


def axes_of(mesh: Mesh) -> list[str]:
    """The dims of the mesh of parameters: the sub-axes of tp, or tp itself."""
    return sorted(sub_axes_of(TP, mesh.coords))


def coords_of_all(mesh: Mesh) -> list[Coords]:
    """Where each rank of tp stands, by rank."""
    sub_axes = {TP: mesh.sub_axes[TP]} if TP in mesh.sub_axes else {}
    size = mesh[TP].size
    return [with_sub_axes({TP: (rank, size)}, sub_axes) for rank in range(size)]


def _named(dim: Dim, axis: str, coords: Coords) -> bool:
    return any(a.mesh and axis in sub_axes_of(a.mesh, coords) for a in atoms(dim))


def _covers(dim: Dim, axis: str, coords: Coords) -> bool:
    """Whether no index of `dim` is held by two ranks of `axis`."""
    if isinstance(dim, Product):
        return any(_covers(f, axis, coords) for f in dim.factors)
    if isinstance(dim, Concat):
        return all(_covers(t, axis, coords) for t in dim.terms)
    return _named(dim, axis, coords)


def _as_torch(
    placement: Placement, dim: int, out: list[Any], mesh: Mesh, every: list[Coords]
) -> bool:
    """Whether each rank holds of `dim` what torch's own sharding would give it, and ours too.

    Where these differ, a plain `Shard` would be read as ours (`layout_of`).
    """
    axes = [a for a, p in zip(axes_of(mesh), out, strict=True) if p == Shard(dim)]
    size = placement.shape[dim] or 0
    ours = Atom(size, together(axes, mesh.coords))
    for coords in every:
        start, stop = 0, size
        for axis in axes:
            rank, ranks = coords[axis]
            share = -(-(stop - start) // ranks)
            end = stop
            start, stop = min(start + rank * share, end), min(start + (rank + 1) * share, end)
        ranges = [(start, stop)] if stop > start else []
        if not local_ranges(placement.dims[dim], coords) == local_ranges(ours, coords) == ranges:
            return False
    return True


def as_dtensor(local: Tensor, whole: torch.Size, spec: DTensorSpec) -> DTensor:
    """A DTensor of `local`, laid out as `spec` and of shape `whole`, that shares its memory."""
    return DTensor(local.detach(), _spec_of(local, whole, spec), requires_grad=False)


def _spec_of(local: Tensor, whole: torch.Size, spec: DTensorSpec) -> DTensorSpec:
    stride = local.stride() if local.shape == whole else _contiguous(whole)
    meta = TensorMeta(whole, stride, local.dtype)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def distributed(
    tensors: Mapping[str, Tensor], placed: Mapping[str, Placement], mesh: Mesh
) -> dict[int, nn.Parameter] | str:
    """The DTensor for each of a model's local parameters, by its id; which one cannot be one.

    Args:
        tensors: the parameters, each name of one that is tied.
        placed: name -> how it lies over `mesh`; one that is absent is whole on each rank.
        mesh: the ranks that share the model.
    """
    device_mesh = mesh.parameter_mesh()
    whole = (Replicate(),) * len(axes_of(mesh))
    known: dict[int, Placement] = {id(tensors[n]): p for n, p in placed.items() if n in tensors}
    alike = {p: placements_of(p, mesh) for p in dict.fromkeys(known.values())}
    specs: dict[Any, DTensorSpec] = {}  # parameters of like layers share theirs
    out: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        placement = known.get(id(tensor))
        placements = whole if placement is None else alike[placement]
        if device_mesh is None or type(tensor.data) is not Tensor:
            return f"'{name}', a {type(tensor).__name__},"
        shape = tensor.shape if placement is None else torch.Size(cast(Any, placement.shape))
        key = placements, shape, tensor.shape, tensor.stride(), tensor.dtype
        if key not in specs:
            specs[key] = _spec_of(tensor, shape, DTensorSpec(device_mesh, placements))
        new: Any = DTensor(tensor.detach(), specs[key], requires_grad=tensor.requires_grad)
        new._is_param = True  # all that nn.Parameter does, which would make another DTensor
        vars(new).update(vars(tensor))
        out[id(tensor)] = new
    return out


def laid_out_as(tensor: DTensor, like: DTensor) -> DTensor:
    """`tensor` with the layout of `like`, if both are over one mesh; else as it is.

    All ranks call it. Not differentiable.
    """
    if tensor.device_mesh != like.device_mesh or tensor.placements == like.placements:
        return tensor
    moved: Any = tensor.detach()
    return moved.redistribute(placements=like.placements)


def local_of(tensor: Tensor, mesh: Mesh) -> Tensor:
    """This rank's part of a DTensor over the ranks of `mesh`; any other tensor as it is.

    One that FSDP2 has split further is gathered over those ranks, which all call this. Not
    differentiable.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor.detach()
    for i in range(len(tensor.placements) - len(axes_of(mesh))):
        placement: Any = tensor.placements[i]
        if not placement.is_replicate():
            local = _joined(local, placement.dim, Group.of(tensor.device_mesh.get_group(i)))
    return local


def _joined(x: Tensor, dim: int, group: Group) -> Tensor:
    """The `x` of all ranks one after the other, where they may differ in size."""
    own = torch.tensor([x.shape[dim]], device=x.device)
    sizes = [int(n) for n in all_gather(own, group).flatten()]
    padded = x.new_zeros([max(sizes) if d == dim else n for d, n in enumerate(x.shape)])
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = all_gather(padded, group)
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, sizes, strict=True)], dim)


def cut(whole: Tensor, like: DTensor, mesh: Mesh, dtype: torch.dtype | None = None) -> DTensor:
    """The DTensor of a `whole` tensor that lies as `like` does; no communication.

    The inverse of `gather_whole(local_of(...))`. Not differentiable. It is of the dtype of `like`
    if no other is asked for.
    """
    extra = len(like.placements) - len(axes_of(mesh))
    local = take_local(whole.to(like.device, dtype or like.dtype), layout_of(like, mesh), mesh)
    for i, placement in enumerate(cast(Any, like.placements[:extra])):
        if not placement.is_replicate():  # FSDP2 cuts as torch.chunk does
            ranks, rank = like.device_mesh.size(i), like.device_mesh.get_local_rank(i)
            share = -(-local.shape[placement.dim] // ranks)
            start = min(rank * share, local.shape[placement.dim])
            length = min(share, local.shape[placement.dim] - start)
            local = local.narrow(placement.dim, start, length).clone()
    return as_dtensor(local, like.shape, like._spec)


def check_own(part: DTensor, own: DeviceMesh, name: str) -> None:
    """Check that a DTensor in a state dict is not one of another rank.

    Raises:
        UsageError: it is one that another rank had.
    """
    theirs = part.device_mesh
    alike = theirs.mesh_dim_names == own.mesh_dim_names
    if alike and theirs.get_coordinate() != own.get_coordinate():
        raise UsageError(
            f"'{name}' in this state dict is the part that another rank had when it saved it: "
            "save parts with torch.distributed.checkpoint, or each rank its own file"
        )


def layout_of(tensor: DTensor, mesh: Mesh) -> Placement:
    """How a parameter, or what is laid out as one, lies over the ranks of `mesh`."""
    axes = axes_of(mesh)
    placements = tensor.placements[len(tensor.placements) - len(axes) :]
    for placement in placements:
        if isinstance(placement, Arranged):
            return parse(placement.layout)
    dims = []
    for dim, size in enumerate(tensor.shape):
        over = [a for a, p in zip(axes, placements, strict=True) if p.is_shard(dim)]
        dims.append(Atom(size, together(over, mesh.coords) if over else None))
    return Placement(tuple(dims))
