"""Makes SplitTensors of a model's local parameters; converts between full and local tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwright.errors import UsageError
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.quantized.kept import KeptWeight
from shardwright.runtime.redistribution import reshard
from shardwright.runtime.tensors import layouts
from shardwright.runtime.tensors.layouts import axes_of, placements_of
from shardwright.runtime.tensors.split_tensor import SplitTensor


def split_parameters(
    tensors: Mapping[str, Tensor], placed: Mapping[str, Placement], mesh: Mesh
) -> dict[int, nn.Parameter] | str:
    """Make a SplitTensor of each local parameter of a model.

    Args:
        tensors: The parameters, with all names of tied ones.
        placed: Name -> placement over `mesh`. An absent parameter is replicated.
        mesh: The ranks that share the model.

    Returns:
        Id of the parameter -> SplitTensor. Instead, a description of the first parameter that
        cannot be one, for a message.
    """
    device_mesh = mesh.parameter_mesh()
    replicated = (Replicate(),) * len(axes_of(mesh))
    known: dict[int, Placement] = {id(tensors[n]): p for n, p in placed.items() if n in tensors}
    torch_s = {p: placements_of(p, mesh) for p in dict.fromkeys(known.values())}
    specs: dict[Any, DTensorSpec] = {}  # parameters of equal layers share a spec
    out: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        placement = known.get(id(tensor))
        placements = replicated if placement is None else torch_s[placement]
        if device_mesh is None or type(tensor.data) not in (Tensor, KeptWeight):
            return f"'{name}', a {type(tensor).__name__},"
        shape = tensor.shape if placement is None else torch.Size(cast(Any, placement.shape))
        key = placements, shape, tensor.shape, tensor.stride(), tensor.dtype
        if key not in specs:
            specs[key] = layouts.spec_of(tensor, shape, DTensorSpec(device_mesh, placements))
        new: Any = SplitTensor(tensor.detach(), specs[key], requires_grad=tensor.requires_grad)  # type: ignore[call-arg]
        new._is_param = True  # as nn.Parameter does, which would make another tensor
        vars(new).update(vars(tensor))
        out[id(tensor)] = new
    return out


def full_of(tensor: Tensor, placement: Placement | None, mesh: Mesh) -> Tensor:
    """The full tensor of a DTensor, or of a local tensor of this placement, on every rank.

    All ranks call this. Not differentiable.
    """
    if not isinstance(tensor, DTensor):
        return tensor if placement is None else reshard.gather_whole(tensor, placement, mesh)
    if any(p.is_partial() for p in tensor.placements):  # a gradient that a hook has changed
        return tensor.full_tensor().detach()
    return layouts.gathered(tensor._local_tensor.detach(), tensor._spec)


def cut(full: Tensor, like: DTensor, dtype: torch.dtype | None = None) -> SplitTensor:
    """Shard a `full` tensor as `like` is; no communication. Not differentiable.

    The result has `dtype`; by default that of `like`.
    """
    local = layouts.cut(full.detach().to(like.device, dtype or like.dtype), like._spec)
    return SplitTensor.of(local.clone(memory_format=torch.contiguous_format), like._spec)


def cut_if_full(
    value: Tensor, like: DTensor, name: str, dtype: torch.dtype | None = None
) -> Tensor:
    """Shard a full `value` as `like` is (`cut`); a DTensor is returned as it is.

    Args:
        value: The tensor, of a state dict perhaps.
        like: The tensor whose place it takes.
        name: Its name, for the message.
        dtype: As for `cut`.

    Raises:
        UsageError: `value` is a DTensor with the coordinates of another rank, which saved it.
    """
    if not isinstance(value, DTensor):
        return cut(value, like, dtype)
    theirs, own = value.device_mesh, like.device_mesh
    alike = theirs.mesh_dim_names == own.mesh_dim_names
    if alike and theirs.get_coordinate() != own.get_coordinate():
        raise UsageError(
            f"'{name}' in this state dict is the part that another rank had when it saved it: "
            "save parts with torch.distributed.checkpoint, or each rank its own file"
        )
    return value


class ReplacedParameter(nn.Parameter):
    """A full parameter whose shards were copied into a split model: no optimizer may train it."""

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]  # pyright: ignore
        """Refuse: an optimizer that reads this would train the wrong parameter."""
        raise UsageError(
            "this parameter was assigned to a split model, which trains a shard of it in its "
            "place: make the optimizer from model.parameters() after the assignment"
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:  # pyright: ignore
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


def mark_replaced(parameter: nn.Parameter) -> None:
    """Make reading the gradient of `parameter` raise an error that says it was replaced."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ReplacedParameter
