"""Sharded buffers: stored as SplitTensors like parameters, so no code mistakes one for full.

The model's own code sees the local tensor, and may change it in place or replace it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwright.errors import PlanError
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.tensors.layouts import placements_of
from shardwright.runtime.tensors.parameters import cut_if_full
from shardwright.runtime.tensors.split_tensor import SplitTensor


def make_buffers_split(model: nn.Module, mesh: Mesh) -> None:
    """Replace local buffers by SplitTensors. Shared buffers stay shared."""
    device_mesh = mesh.parameter_mesh()
    assert device_mesh is not None
    made: dict[int, Tensor] = {}
    for module in model.modules():
        placed = getattr(vars(module).get("_shardwright"), "placements", {})
        for name, placement in placed.items():
            buffer: Any = module._buffers.get(name)
            if buffer is None or not placement.meshes:
                continue
            spec = DTensorSpec(device_mesh, placements_of(placement, mesh))
            shape = torch.Size(n or 0 for n in placement.shape)
            new = made.setdefault(id(buffer), SplitTensor.of(buffer.detach(), spec, shape))
            vars(new).update(vars(buffer))
            module._buffers[name] = new


def stored_as(value: Tensor, stored: SplitTensor, name: str) -> Tensor:
    """Return what to store when `value`, full or local, replaces a sharded buffer.

    Raises:
        PlanError: `value` has neither the full nor the local shape.
        UsageError: `value` is a DTensor that another rank saved.
    """
    full = stored._spec.shape  # `stored.shape` is that of the local tensor in a planned call
    if value.shape == full:
        return cut_if_full(value, stored, name, value.dtype)
    if not isinstance(value, DTensor) and value.shape == stored._local_tensor.shape:
        return SplitTensor.of(value.detach(), stored._spec)
    raise PlanError(
        f"'{name}' has shape {list(full)} in the unsplit model, and what is put in its "
        f"place has {list(value.shape)}"
    )
