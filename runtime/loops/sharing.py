"""Has the copies of a split model share out the parameters that its plan says, by FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from shardwright.errors import UsageError
from shardwright.planner.contract.names import numbered
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.boundary.module_boundary import boundary_of

M = TypeVar("M", bound=nn.Module)


def fully_shard(model: M, plan: Plan | str | Path, **options: Any) -> M:
    """Put torch's `fully_shard` around the blocks of a split model and around the model, in place.

    Over the mesh dim of its copies, it shards the parameters that the plan shares out. Each copy
    keeps the others, and the model goes on to average their gradients.

    Args:
        model: A model that `plan` was applied to, before there is an optimizer.
        plan: The plan, or its file, made with `dp="fsdp"`.
        **options: Options of torch's `fully_shard`, except `mesh` and `ignored_params`.

    Returns:
        `model`.

    Raises:
        UsageError: no plan was applied to the model, the plan is not for copies that may share out
            parameters, or several mesh dims count copies.
        PlanError: the plan cannot be read.
    """
    plan = Plan.load(plan)
    boundary = boundary_of(model)
    mesh = boundary.model.mesh.device_mesh if boundary and boundary.model else None
    if mesh is None:
        raise UsageError("fully_shard of a model without a plan: apply or load it with one first")
    if plan.workload.dp != "fsdp" or len(plan.batch_dims) != 1:
        raise UsageError(
            "fully_shard as the plan says: it must be made with dp='fsdp' (--dp fsdp), for a mesh "
            "with one dim of copies, as dp=2,tp=4 has"
        )
    parameters = dict(model.named_parameters())
    shared = {*filter(plan.is_shared, parameters)}
    options |= {
        "mesh": mesh[plan.batch_dims[0]],
        "ignored_params": {p for n, p in parameters.items() if n not in shared},
    }
    for block in sorted({_block(model, name) for name in shared} - {""}):
        torch_fully_shard(model.get_submodule(block), **options)
    if shared:
        torch_fully_shard(model, **options)
    return model


def _block(model: nn.Module, parameter: str) -> str:
    """Return the outermost numbered module of several that a parameter is in; "" if in none.

    Lists of modules cannot be called, and FSDP2 around a single layer may miss its gradient.
    """
    for name in numbered(parameter.rpartition(".")[0]):
        block = model.get_submodule(name)
        if any(block.children()) and not isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            return name
    return ""
