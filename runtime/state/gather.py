"""Gathers full tensors from a split model's local ones, and shards them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.errors import PlanError
from shardwright.planner.contract.mesh import mesh_dim_of
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.boundary.module_boundary import mesh_of, placements
from shardwright.runtime.checkpoint.names import all_tensors
from shardwright.runtime.communication import facts
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.ranks.agreement import agree
from shardwright.runtime.redistribution.reshard import take_local
from shardwright.runtime.tensors.parameters import cut, full_of


def full_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Gather full tensors on every rank, by the name of the parameter that they belong to.

    All ranks must call this with the same names. Scalars, such as Adam's `step`, pass through.

    Args:
        model: A model to which a plan was applied.
        tensors: Parameter or buffer name -> a tensor with that parameter's placements: a DTensor,
            as parameters, their gradients and optimizer states are, or a local tensor.

    Example:
        full_tensors(model, {n: p.grad for n, p in model.named_parameters()})

    Raises:
        PlanError: the model has no such name, or a shape is neither the full one (of a DTensor)
            nor the local one.
    """
    mesh, placed = mesh_of(model), placements(model)
    # Before anything is sent: an error must not leave other ranks waiting.
    failure = _failure(tensors, all_tensors(model), placed, mesh)
    dims = {mesh_dim_of(name) for p in placed.values() for name in p.named}
    groups = mesh.process_groups(dims) if mesh is not None else []
    agree("gathering tensors", failure, {"names": facts.digest(sorted(tensors))}, groups)
    out = {}
    for name in sorted(tensors):
        value = out[name] = tensors[name]
        if isinstance(value, Tensor) and mesh is not None:
            out[name] = full_of(value, None if _is_scalar(value) else placed.get(name), mesh)
    return out


def split_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Shard full tensors as this rank stores them: the inverse of `full_tensors`.

    There is no communication. Scalars pass through.

    Args:
        model: A model to which a plan was applied.
        tensors: Parameter or buffer name -> a full tensor of that parameter's shape.

    Returns:
        For each name a DTensor, or a local tensor if the parameter is one.

    Raises:
        PlanError: the model has no such name, or a shape is not that of the full parameter.
    """
    mesh, placed, held = mesh_of(model), placements(model), all_tensors(model)
    out = {}
    for name, value in tensors.items():
        if name not in held:
            raise PlanError(f"the model has no parameter or buffer '{name}'")
        like = held[name]
        if not _is_scalar(value) and mesh is not None:
            plain = not isinstance(like, DTensor)
            whole = placed[name].shape if plain and name in placed else tuple(like.shape)
            if tuple(value.shape) != whole:
                raise PlanError(
                    f"the tensor for '{name}' has shape {list(value.shape)}; "
                    f"the whole has {list(whole)}"
                )
            if isinstance(like, DTensor):
                value = cut(value, like, value.dtype)
            elif name in placed:
                value = take_local(value, placed[name], mesh.coords)
        out[name] = value
    return out


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def _failure(
    tensors: Mapping[str, Any],
    held: Mapping[str, Tensor],
    placed: Mapping[str, Placement],
    mesh: Mesh | None,
) -> PlanError | None:
    for name, value in tensors.items():
        if name not in held:
            return PlanError(f"the model has no parameter or buffer '{name}'")
        own = held[name].shape
        if mesh is not None and name in placed:
            at = placed[name]
            sizes = at.shape if isinstance(value, DTensor) else at.local_shape(mesh.coords)
            own = torch.Size(n or 0 for n in sizes)
        if not _is_scalar(value) and value.shape != own:
            return PlanError(
                f"the tensor for '{name}' has shape {list(value.shape)}; "
                f"this rank's part has {list(own)}"
            )
    return None
