"""Whole tensors from a split model's local ones: parameters, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.runtime.dtensors import local_of
from shardwright.runtime.local import mesh_of, placements
from shardwright.runtime.reshard import gather_whole


def full_tensors(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Whole tensors, on every rank, by the name of the parameter that they belong to.

    All ranks must call it with the same names. Scalars, such as Adam's `step`, pass through.

    Args:
        model: a model that a plan was applied to.
        tensors: parameter or buffer name -> a local tensor of that parameter's layout.

    Example:
        full_tensors(model, {n: p.grad for n, p in model.named_parameters()})

    Raises:
        PlanError: a name is not the model's, or a shape is not that of the rank's part.
    """
    mesh, placed = mesh_of(model), placements(model)
    local: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    local.update(model.named_parameters(remove_duplicate=False))
    local = {n: local_of(tensor) for n, tensor in local.items()}
    tensors = {n: local_of(tensors[n]) for n in sorted(tensors)}
    # Before anything is sent: an error must not leave other ranks waiting.
    for name, value in tensors.items():
        _check(name, value, local)
    out = {}
    for name, value in tensors.items():
        if _is_scalar(value) or mesh is None or name not in placed:
            out[name] = value
        else:
            out[name] = gather_whole(value, placed[name], mesh)
    return out


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def _check(name: str, value: Any, local: Mapping[str, Tensor]) -> None:
    if name not in local:
        raise PlanError(f"the model has no parameter or buffer '{name}'")
    if not _is_scalar(value) and value.shape != local[name].shape:
        raise PlanError(
            f"the local tensor for '{name}' has shape {list(value.shape)}; "
            f"this rank's part has {list(local[name].shape)}"
        )
