"""Shardwright: tensor parallelism for any Hugging Face model.

    plan = shardwright.plan("Qwen/Qwen3-8B", tp=4)            # on a laptop, no weights needed
    plan.save("plan.json")
    model = shardwright.load("Qwen/Qwen3-8B", "plan.json")    # under torchrun, on each rank

This is the whole public surface. Names that need torch are imported when they are first used, so
that `import shardwright` and `shardwright --help` take no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.errors import (
    CheckpointError,
    DistributedError,
    InfeasibleError,
    ModelError,
    PlanError,
    PluginError,
    ShardwrightError,
    SolverError,
    UsageError,
)

if TYPE_CHECKING:
    from shardwright.planner.api import plan
    from shardwright.planner.contract.plan_file import Plan
    from shardwright.planner.exports.exports import export
    from shardwright.planner.on_ranks.numeric import compare
    from shardwright.planner.prove.check import check
    from shardwright.planner.report.diff import differences
    from shardwright.planner.report.explain import explain
    from shardwright.planner.search.meshes import Cluster
    from shardwright.planner.tune import tune
    from shardwright.rules.registry import register_rule
    from shardwright.runtime.api import apply, load, save
    from shardwright.runtime.boundary.patches import adding_adapters
    from shardwright.runtime.in_transformers import tp_plan
    from shardwright.runtime.loops.accelerating import SplitAccelerator
    from shardwright.runtime.loops.sharing import fully_shard
    from shardwright.runtime.loops.training import SplitTrainer
    from shardwright.runtime.state.gather import full_tensors, split_tensors
    from shardwright.runtime.state.whole_optimizer import (
        full_optimizer_state,
        load_full_optimizer_state,
    )

    __version__: str

__all__ = [
    "CheckpointError",
    "Cluster",
    "DistributedError",
    "InfeasibleError",
    "ModelError",
    "Plan",
    "PlanError",
    "PluginError",
    "ShardwrightError",
    "SolverError",
    "SplitAccelerator",
    "SplitTrainer",
    "UsageError",
    "__version__",
    "adding_adapters",
    "apply",
    "check",
    "compare",
    "differences",
    "explain",
    "export",
    "full_optimizer_state",
    "full_tensors",
    "fully_shard",
    "load",
    "load_full_optimizer_state",
    "plan",
    "register_rule",
    "save",
    "split_tensors",
    "tp_plan",
    "tune",
]

_HOME = {
    "Cluster": "shardwright.planner.search.meshes",
    "Plan": "shardwright.planner.contract.plan_file",
    "SplitAccelerator": "shardwright.runtime.loops.accelerating",
    "SplitTrainer": "shardwright.runtime.loops.training",
    "adding_adapters": "shardwright.runtime.boundary.patches",
    "apply": "shardwright.runtime.api",
    "check": "shardwright.planner.prove.check",
    "compare": "shardwright.planner.on_ranks.numeric",
    "differences": "shardwright.planner.report.diff",
    "explain": "shardwright.planner.report.explain",
    "export": "shardwright.planner.exports.exports",
    "full_optimizer_state": "shardwright.runtime.state.whole_optimizer",
    "full_tensors": "shardwright.runtime.state.gather",
    "fully_shard": "shardwright.runtime.loops.sharing",
    "load": "shardwright.runtime.api",
    "load_full_optimizer_state": "shardwright.runtime.state.whole_optimizer",
    "plan": "shardwright.planner.api",
    "register_rule": "shardwright.rules.registry",
    "save": "shardwright.runtime.api",
    "split_tensors": "shardwright.runtime.state.gather",
    "tp_plan": "shardwright.runtime.in_transformers",
    "tune": "shardwright.planner.tune",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shardwright")
    except PackageNotFoundError:  # run from a checkout with PYTHONPATH=src
        return "0+unknown"
