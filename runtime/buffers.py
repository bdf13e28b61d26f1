"""Split buffers in state dicts: DTensors there, as parameters are, so that none is taken for whole.

In the modules they stay plain local tensors, which code changes in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwright.errors import PlanError
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.dtensors import as_dtensor, check_own, placements_of
from shardwright.runtime.mesh import Mesh
from shardwright.runtime.reshard import take_local


def _split(module: Any) -> Iterator[tuple[str, Tensor, Placement, Mesh]]:
    """The buffers of a split module of which each rank has a part, by name."""
    state = module._shardwright
    for name, buffer in module._buffers.items():
        placement = state.placements.get(name)
        if buffer is not None and placement is not None and placement.meshes:
            yield name, buffer, placement, state.mesh


def show(module: Any, destination: Any, prefix: str) -> None:
    """Put DTensors, which share their memory, in the place of split buffers in a state dict."""
    for name, buffer, placement, mesh in _split(module):
        device_mesh = mesh.parameter_mesh()
        if prefix + name in destination and device_mesh is not None:
            spec = DTensorSpec(device_mesh, placements_of(placement, mesh))
            whole: Any = placement.shape
            destination[prefix + name] = as_dtensor(buffer, torch.Size(whole), spec)


def cut(module: Any, state_dict: Any, prefix: str) -> None:
    """Put this rank's parts in the place of whole buffers, and of DTensors, in a state dict.

    Raises:
        PlanError: a DTensor is not of the shape of the whole.
        UsageError: it is one that another rank had.
    """
    for name, buffer, placement, mesh in _split(module):
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor):
            if tuple(value.shape) != placement.shape:
                raise PlanError(
                    f"'{prefix}{name}' in this state dict has shape {list(value.shape)}; "
                    f"the whole has {list(placement.shape)}"
                )
            if (own := mesh.parameter_mesh()) is not None:
                check_own(value, own, prefix + name)
            state_dict[prefix + name] = value._local_tensor
        elif isinstance(value, Tensor) and tuple(value.shape) == placement.shape:
            state_dict[prefix + name] = take_local(value.to(buffer.device), placement, mesh)
