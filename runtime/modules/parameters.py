"""Replaces full parameters by local ones, and then by DTensors; tied parameters stay tied."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.boundary.changes import ChangeDetection
from shardwright.runtime.boundary.module_boundary import boundary_of, placements
from shardwright.runtime.boundary.patches import patches_for
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution.reshard import take_local
from shardwright.runtime.tensors.buffers import make_buffers_split
from shardwright.runtime.tensors.parameters import split_parameters


class LocalTensors:
    """Maps full tensors of one model to the local tensors that replaced them.

    Modules that share a full parameter also share its local one.
    """

    def __init__(self) -> None:
        # This keeps the full tensors alive, so that ids are not reused.
        self._known: dict[int, tuple[Tensor, Tensor, Placement]] = {}

    def local(self, old: Tensor, placement: Placement, mesh: Mesh, name: str) -> Tensor:
        """The local tensor for the full tensor `old`, the same one each time.

        A replicated parameter is returned as it is.

        Raises:
            PlanError: the shape differs from the plan's, or the tensor is tied to one with another
                placement.
        """
        for whole, new, earlier in self._known.values():
            if old is whole or old is new:
                if earlier != placement:
                    raise PlanError(
                        f"'{name}' is tied to a parameter laid out as '{earlier}', "
                        f"but the plan lays it out as '{placement}'"
                    )
                return new
        if tuple(old.shape) != placement.shape:
            raise PlanError(
                f"'{name}' has shape {list(old.shape)}; the plan is for {list(placement.shape)}"
            )
        new = old if not placement.meshes else _local_part(old, placement, mesh)
        self._known[id(old)] = (old, new, placement)
        return new

    def check_ties(self, model: nn.Module) -> None:
        """Raise PlanError if a module still holds a full parameter that is sharded elsewhere."""
        split = {id(old) for old, new, _ in self._known.values() if old is not new}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in split:
                raise PlanError(
                    f"'{name}' is tied to a parameter that the plan splits, "
                    "but the plan says nothing about it: plan the model with its weights tied"
                )


def _local_part(old: Tensor, placement: Placement, mesh: Mesh) -> Tensor:
    """Return the local tensor. On meta it only has the shape: the loader fills in the numbers."""
    if old.is_meta:
        sizes = [n or 0 for n in placement.local_shape(mesh.coords)]
        new = torch.empty(sizes, dtype=old.dtype, device="meta")
    else:
        new = take_local(old, placement, mesh.coords)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    vars(new).update(vars(old))  # marks that optimizers read, such as _no_weight_decay
    return new


def make_dtensors(model: nn.Module, mesh: Mesh) -> None:
    """Make the local parameters of a split model DTensors over `mesh`, all of them or none.

    The model's calls get the patches of torch that its code needs. (A dry run makes neither.)
    They stay plain local tensors if one of them cannot be a DTensor (see `split_parameters`), which
    logs a warning, or if `mesh` has no DeviceMesh.
    """
    root = boundary_of(model)
    if root is not None and root.model is not None:
        root.model.patched = patches_for(model)
    if mesh.device_mesh is None:
        return
    named = dict(model.named_parameters(remove_duplicate=False))
    made = split_parameters(named, placements(model), mesh)
    if isinstance(made, str):
        logging.getLogger("shardwright").warning(
            "parameters stay plain local tensors, since %s cannot be a DTensor: do not use torch's "
            "clip_grad_norm_, FSDP2 or distributed checkpoints on this model, which would take "
            "them for whole ones",
            made,
        )
        return
    make_buffers_split(model, mesh)
    for module in model.modules():
        own: dict[str, Any] = module._parameters
        own.update({name: made[id(p)] for name, p in own.items() if p is not None})
    if root is not None and root.model is not None:
        root.model.distribute(ChangeDetection(root.model))
