"""Lets transformers' `from_pretrained` apply a plan: a parallel style for a complete model.

    config = DistributedConfig(tp_size=2, tp_plan=shardwright.tp_plan("plan.json"))
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

A style of transformers describes one module. Ours is set on the direct children of a model and
stands for the entire plan: fused weights, uneven shards, key heads that ranks share, local
integers. transformers shards tensors by torch's placements before it converts them, which is wrong
for such shards. Therefore shards are read as `shardwright.load` reads them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.mesh import TP
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import split_and_read
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.code.closures import check_closures
from shardwright.runtime.communication.processes import Ready, meet
from shardwright.runtime.model.identity import check_identity
from shardwright.runtime.model.unregistered import numbers_made, refuse_unregistered

STYLE = "shardwright"
WANTED = "_shardwright_wanted"


class Table(dict[str, str]):
    """A `tp_plan` that transformers does not merge into the model's own plan."""

    def __ror__(self, other: object) -> Table:
        return self


def tp_plan(plan: Plan | str | Path) -> dict[str, str]:
    """A plan as a `tp_plan` for `DistributedConfig` of transformers; every rank calls this.

    `from_pretrained` then returns the same model as `shardwright.load`, plus the attributes by
    which transformers' Trainer and `generate` recognize a split model.

    Args:
        plan: The plan, or its file.

    Returns:
        The table. It names a style that is registered with transformers in this process.

    Raises:
        PlanError: the plan was edited since it was written, or its mesh has other dims than tp.
    """
    plan = plan.unedited() if isinstance(plan, Plan) else Plan.load(plan).unedited(plan)
    if others := [name for name in plan.mesh if name != TP]:
        raise PlanError(
            f"the plan has copies of the model over {', '.join(others)}: plan with tp alone, and "
            "ask transformers for copies"
        )
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    _take_over()
    name = f"{STYLE}:{plan.digest[:16]}"
    ALL_PARALLEL_STYLES.register(name, _whole_plan(plan))
    parts = {name.partition(".")[0] for name in plan.model.parameters if "." in name}
    return Table(dict.fromkeys(sorted(parts), name))


def _whole_plan(plan: Plan) -> Any:
    """A style that applies `plan` to the model that contains the styled modules."""
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    class WholePlan(TensorParallelLayer):
        """Notes on a module the plan and mesh, for when the weights are to be read."""

        def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            """Transformers calls this with a module of an unsplit model on meta."""
            module.__dict__[WANTED] = (plan, mesh)
            return module

    return WholePlan()


@functools.cache
def _take_over() -> None:
    """Patch transformers' loading: a model with our style is split and read by us.

    Raises:
        UsageError: this version of transformers loads models in another way.
    """
    from transformers import PreTrainedModel
    from transformers.utils.loading_report import LoadStateDictInfo

    cls: Any = PreTrainedModel
    try:
        load, finalize = cls._load_pretrained_model, cls._finalize_model_loading
    except AttributeError:
        import transformers

        raise UsageError(
            f"transformers {transformers.__version__} does not load models as 5.23 does: use "
            "shardwright.load"
        ) from None

    @functools.wraps(load)
    def load_ours(model: Any, state: Any, files: Any, config: Any, *rest: Any) -> Any:
        asked = [m.__dict__.pop(WANTED) for m in model.children() if WANTED in m.__dict__]
        if not asked:
            return load(model, state, files, config, *rest)
        _refuse(model, files, config)
        model.__dict__[WANTED] = (*asked[0], files)
        for tensor in model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True  # will be read, not initialized
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})  # it ties missing ones
        none = {"unexpected_keys": set(), "mismatched_keys": set(), "skipped_pp_keys": set()}
        info = LoadStateDictInfo(missing_keys=tied, conversion_errors={}, error_msgs=[], **none)
        return info, None

    @functools.wraps(finalize)
    def finalize_ours(model: Any, config: Any, info: Any) -> Any:
        info = finalize(model, config, info)
        if (wanted := model.__dict__.pop(WANTED, None)) is not None:
            plan, mesh, files = wanted
            _carry_out(model, plan, mesh, files, config)
        return info

    cls._load_pretrained_model = staticmethod(load_ours)
    cls._finalize_model_loading = staticmethod(finalize_ours)


def _refuse(model: nn.Module, files: Any, config: Any) -> None:
    """Raise UsageError for files that we cannot read, or a model that has other styles."""
    if config.hf_quantizer is not None:
        raise UsageError(
            "from_pretrained cannot split a quantized checkpoint by a plan: use shardwright.load"
        )
    if not files or not str(files[0]).endswith(".safetensors"):
        raise UsageError("a plan is carried out on safetensors files: save the model as such")
    styled = [n for n, m in model.named_modules() if "." in n and hasattr(m, HOOKED)]
    if styled:
        raise UsageError(
            f"transformers' own style for '{styled[0]}' came beside the plan: give "
            "DistributedConfig what shardwright.tp_plan returned, not a copy of it"
        )


HOOKED = "_is_hooked"
"""The attribute that transformers sets on modules to which it has applied a style."""


def _carry_out(model: nn.Module, plan: Plan, mesh: DeviceMesh, files: list[str], how: Any) -> None:
    """Split a model on meta, and read this rank's shards of the files."""

    def prepare(plan: Plan) -> Ready:
        check_identity(model, plan)
        check_closures(model)
        refuse_unregistered(model)
        checkpoint = Checkpoint.open(Path(files[0]).parent)
        alike = {"dtype": str(how.dtype), "weights": checkpoint.digest()}
        return Ready(checkpoint, alike, numbers_made(model, persistent=False))

    device = torch.device(next(iter((how.device_map or {"": "cpu"}).values())))
    plan, ranks, checkpoint = meet(plan, mesh, device, what="loading", prepare=prepare)
    split_and_read(model, plan, ranks, checkpoint, device, dtype=how.dtype)
