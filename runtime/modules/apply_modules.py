"""`apply_modules`: the parallel layer of each module that a plan names, in place."""

from __future__ import annotations

from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.boundary.module_boundary import link_origins
from shardwright.runtime.boundary.root import wrap_root
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.modules.attention import split_by_heads
from shardwright.runtime.modules.fast_paths import block_fast_paths
from shardwright.runtime.modules.global_modules import unshare_globals
from shardwright.runtime.modules.layers import apply_module
from shardwright.runtime.modules.parameters import LocalTensors
from shardwright.runtime.redistribution.lengths import Lengths
from shardwright.runtime.subclasses import forwards_into_classes


def apply_modules(model: nn.Module, plan: Plan, mesh: Mesh, defer: bool = True) -> None:
    """Apply the plan of each module, in place.

    Args:
        model: The model; its class is not compared with the plan's.
        plan: The plan.
        mesh: The mesh.
        defer: Whether logits may stay sharded while a loss is computed.

    Raises:
        PlanError: the plan names a module that the model does not have.
    """
    unshare_globals(model)
    forwards_into_classes(model)
    split_by_heads(model)
    tensors, lengths = LocalTensors(), Lengths()
    done = set()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        spec = plan.module(name)
        if spec is not None and id(module) not in done:
            done.add(id(module))
            deferred = defer and any(c.deferred for c in spec.outputs)
            apply_module(
                module, spec, mesh, tensors=tensors, path=name, defer=deferred, lengths=lengths
            )
    missing = [key for key in plan.modules if "*" not in key and key not in modules]
    if missing:
        raise PlanError(
            f"the plan has an entry for '{missing[0]}', which {type(model).__name__} does not have"
        )
    tensors.check_ties(model)
    if any(c.before is not None for spec in plan.modules.values() for c in spec.inputs):
        link_origins(model)
    block_fast_paths(model)
    wrap_root(model, lengths, plan.calls, mesh)
