"""`load` and `apply`: a plan and a model in, a model that computes its part of the whole out."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import PlanError, ShardwrightError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.attention import split_by_heads
from shardwright.runtime.build import empty_model, model_class
from shardwright.runtime.checkpoint import write
from shardwright.runtime.checkpoint.conversion import Conversions
from shardwright.runtime.checkpoint.load import load_weights
from shardwright.runtime.checkpoint.read import Report
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.config import read_config
from shardwright.runtime.fast_paths import block_fast_paths
from shardwright.runtime.identity import check_identity
from shardwright.runtime.layers import apply_module
from shardwright.runtime.lengths import Lengths
from shardwright.runtime.local import link_origins, mesh_of, placements
from shardwright.runtime.mesh import Mesh
from shardwright.runtime.parameters import LocalTensors, distribute
from shardwright.runtime.processes import agree, device_mesh_for, end_in_order, pick_device
from shardwright.runtime.replicas import average_gradients
from shardwright.runtime.root import wrap_root


def load(
    model: str | Path,
    plan: Plan | str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float = 600.0,
    allow_surplus: bool = False,
    progress: bool = False,
    **model_kwargs: Any,
) -> nn.Module:
    """Load a checkpoint split over the ranks of a process group; every rank calls this.

    Each rank builds the model without memory for its parameters, swaps in the layers of the plan,
    and reads only its own part of the weights.

    Args:
        model: Directory or hub id with safetensors.
        plan: The plan, or the file it is in.
        dtype: What floating weights are cast to; None keeps the checkpoint's.
        device: Where this rank computes; by default its own GPU, else the CPU.
        mesh: A device mesh with a dim for each of the plan's ("tp"); made if there is none, and
            then the process group too where the caller has not initialised it.
        timeout: Seconds that a rank waits for the others before it fails.
        allow_surplus: Leave weights that the model has no place for unread.
        progress: Show a bar on stderr, if that is a terminal.
        **model_kwargs: Passed to the model class, such as `attn_implementation`.

    Returns:
        The model, in eval mode; `model.shardwright_report` says what was read.

    Raises:
        PlanError: the plan is not for this model.
        CheckpointError: weights are missing, surplus, damaged or of another shape.
        DistributedError: there are fewer ranks than the plan needs, or another rank failed.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    where = pick_device(device)
    mesh = device_mesh_for(plan, mesh, where, timeout)
    failure: ShardwrightError | None = None
    try:
        out = _load(
            model,
            plan,
            Mesh.from_device_mesh(mesh),
            where,
            dtype,
            allow_surplus,
            progress,
            model_kwargs,
        )
    except ShardwrightError as error:
        failure, out = error, None
    agree(plan, failure)
    assert out is not None
    return out


def _load(
    name: str | Path,
    plan: Plan,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype | None,
    allow_surplus: bool,
    progress: bool,
    model_kwargs: dict[str, Any],
) -> nn.Module:
    config = read_config(name)
    checkpoint = Checkpoint.open(name)
    cls: Any = model_class(config)
    chosen = dtype or checkpoint.dtype
    model = empty_model(cls._from_config, copy.deepcopy(config), dtype=chosen, **model_kwargs)
    conversions = Conversions(model)
    mesh = _split(model, plan, mesh)
    report: Report = load_weights(
        model,
        checkpoint,
        placements(model),
        mesh.coords,
        device=device,
        dtype=dtype,
        allow_surplus=allow_surplus,
        progress=progress,
        conversions=conversions,
    )
    model.shardwright_report = report  # type: ignore[assignment]
    distribute(model, mesh)
    average_gradients(model, [mesh[name] for name in plan.batch_dims])
    return _with_generation_config(model, name).eval()


def _with_generation_config(model: nn.Module, name: str | Path) -> nn.Module:
    """`model` with the generation settings that came with the checkpoint, if any did."""
    from transformers import GenerationConfig

    if getattr(model, "can_generate", lambda: False)():
        with suppress(OSError):  # none came with it
            settings: Any = GenerationConfig.from_pretrained(name)
            model.generation_config = settings
    return model


def apply(model: nn.Module, plan: Plan | str | Path, mesh: DeviceMesh | Mesh) -> nn.Module:
    """Split a module at hand, in place: each rank keeps its part of every parameter that is split.

    Args:
        model: A whole module, the same on each rank, on a device or on meta.
        plan: The plan, or the file it is in.
        mesh: A device mesh with a dim for each of the plan's. Over those that share a batch,
            gradients are averaged from then on (see `runtime/replicas.py`).

    Returns:
        `model`.

    Raises:
        PlanError: the plan is for another model or another number of ranks.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    if isinstance(mesh, DeviceMesh):
        end_in_order()
        mesh = Mesh.from_device_mesh(mesh)
    mesh = _split(model, plan, mesh)
    distribute(model, mesh)
    average_gradients(model, [mesh[name] for name in plan.batch_dims])
    return model


def _split(model: nn.Module, plan: Plan, mesh: Mesh) -> Mesh:
    """Split `model` over `mesh`, which is given back with groups for the plan's sub-axes."""
    for name, size in plan.mesh.items():
        have = mesh.coords.get(name, (0, 0))[1]
        if have != size:
            raise PlanError(
                f"the plan is for {size} ranks on mesh dim '{name}', the mesh has {have}"
            )
    check_identity(model, plan)
    mesh = mesh.with_sub_axes(plan.sub_axes)
    apply_modules(model, plan, mesh)
    return mesh


def save(model: nn.Module, directory: str | Path, max_shard_size: int | str = "5GB") -> None:
    """Write a split model whole, so that plain transformers loads it; all ranks call this.

    Args:
        model: A model that a plan was applied to.
        directory: Where to; files appear in it only when all is written.
        max_shard_size: Bytes, or a number with KB, MB or GB, of one file.

    Raises:
        PlanError: no plan was applied to `model`.
        CheckpointError: the directory cannot be written.
    """
    mesh = mesh_of(model)
    if mesh is None:
        raise PlanError(f"this {type(model).__name__} is not split: save it with save_pretrained")
    write.save(model, directory, placements(model), mesh, max_shard_size=max_shard_size)


def apply_modules(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Change every module that `plan` speaks of, in place, whoever `model` is."""
    split_by_heads(model)
    tensors, lengths = LocalTensors(), Lengths()
    done = set()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        spec = plan.module(name)
        if spec is not None and id(module) not in done:
            done.add(id(module))
            deferred = any(c.deferred for c in spec.outputs)
            apply_module(
                module, spec, mesh, tensors=tensors, path=name, defer=deferred, lengths=lengths
            )
    missing = [key for key in plan.modules if "*" not in key and key not in modules]
    if missing:
        raise PlanError(
            f"the plan speaks of '{missing[0]}', which {type(model).__name__} does not have"
        )
    tensors.check_ties(model)
    link_origins(model)
    block_fast_paths(model)
    wrap_root(model, lengths)
