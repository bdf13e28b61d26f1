"""`load` and `apply`: a plan and a model in, a model that computes its part of the whole out."""

from __future__ import annotations

from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.plan_file import Plan

from .layers import apply_module
from .mesh import Mesh
from .parameters import LocalTensors
from .root import wrap_root


def apply_modules(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Change every module of `model` that `plan` speaks of, in place.

    Raises:
        PlanError: the plan is of another model.
    """
    tensors = LocalTensors()
    done = set()
    for name, module in list(model.named_modules()):
        spec = plan.module(name)
        if spec is not None and id(module) not in done:
            done.add(id(module))
            deferred = any(c.deferred for c in spec.outputs)
            apply_module(module, spec, mesh, tensors=tensors, path=name, defer=deferred)
    missing = [key for key in plan.modules if "*" not in key and key not in dict(model.named_modules())]
    if missing:
        raise PlanError(f"the plan speaks of '{missing[0]}', which {type(model).__name__} does not have")
    tensors.check_ties(model)
    wrap_root(model)
