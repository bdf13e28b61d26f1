"""`load` and `apply`: a plan and a model in, a model that computes its part of the whole out."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright
from shardwright.errors import CheckpointError, PlanError, UsageError, first_line
from shardwright.planner.contract.files import read_json
from shardwright.planner.contract.mesh import read_mesh
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime import debug
from shardwright.runtime.boundary.module_boundary import mesh_of, placements
from shardwright.runtime.boundary.root import take_own_rows
from shardwright.runtime.checkpoint import write
from shardwright.runtime.checkpoint.conversion import Conversions
from shardwright.runtime.checkpoint.load import load_weights, without_weights
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.code.closures import check_closures
from shardwright.runtime.communication import facts
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.communication.processes import (
    Ready,
    Unplanned,
    groups_of,
    meet,
    pick_device,
)
from shardwright.runtime.communication.replicas import average_gradients
from shardwright.runtime.loops.adapting import is_adapted, save_adapters
from shardwright.runtime.model.build import as_dtype, building, compute_buffers, empty_model
from shardwright.runtime.model.config import read_config
from shardwright.runtime.model.hub import Hub
from shardwright.runtime.model.identity import check_identity
from shardwright.runtime.model.packages import BUILT_FROM, PackageConfig
from shardwright.runtime.model.unregistered import held_apart, numbers_made
from shardwright.runtime.modules.apply_modules import apply_modules
from shardwright.runtime.modules.parameters import make_dtensors
from shardwright.runtime.modules.recomputation import recompute_blocks
from shardwright.runtime.quantized.config import drop_quantization, read_quantization
from shardwright.runtime.ranks.agreement import agree, tried
from shardwright.runtime.rows.own_rows import WHOLE, own_rows_wanted

M = TypeVar("M", bound=nn.Module)

INSTEAD = {"torch_dtype": "dtype", "device_map": "device, that of this rank"}
"""Argument of transformers -> the one of `load` that does the same."""

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedModel

    class LoadedModel(PreTrainedModel, GenerationMixin):
        """What editors know of a model that is loaded by name. It has the model's own class."""

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            """As the model's own, whose annotations fit none of transformers' models."""


def load(
    model: str | Path,
    plan: Plan | str | Path | None = None,
    *,
    tp: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    cp: Literal["whole", "local"] = WHOLE,
    timeout: float = 600.0,
    allow_surplus: bool = False,
    progress: bool = False,
    trust_remote_code: bool = False,
    weights: bool = True,
    dequantize: bool | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    subfolder: str | None = None,
    **model_kwargs: Any,
) -> LoadedModel:
    """Load a checkpoint split over the ranks of a process group; every rank calls this.

    Each rank builds the model without memory for its parameters, swaps in the layers of the plan,
    and reads only its own part of the weights. On the CPU, contiguous shards are memory-mapped:
    do not write into a checkpoint's files while the model runs, but replace them.

    Args:
        model: Directory or hub id with safetensors, of transformers, diffusers or timm. Of the
            directory of a pipeline its denoiser is loaded.
        plan: The plan, or its file.
        tp: In place of a plan: the first rank plans for so many ranks, as
            `shardwright.plan(model, tp)` does, and all ranks use that plan.
        dtype: What floating weights are cast to, also as a string ("bfloat16"). None or "auto"
            keeps the checkpoint's. Weights that a class of transformers keeps in float32 are in
            float32 either way.
        device: Where this rank computes; by default its own GPU, else the CPU.
        mesh: A device mesh with a dim for each of the plan's ("tp"). By default it is made, and the
            process group too, if there is none. Without `plan` and `tp`, its dims are planned for.
        cp: What each rank of a plan's `cp` is given, as `apply` takes it.
        timeout: Seconds until all ranks must have started, and that a rank waits for the others
            at any later time before it fails.
        allow_surplus: Leave weights that the model has no place for unread.
        progress: Show a bar on stderr, if that is a terminal.
        trust_remote_code: Whether to run code that comes with the model: else that is refused.
        weights: Whether to read weights. Without, all that is needed is a config, and parameters
            get small random numbers, replicated ones the same on all ranks: for measurements.
        dequantize: Whether weights of a quantized checkpoint are computed once, when they are read.
            Otherwise they are held as they are stored, frozen, and computed at each use. None does
            what the plan was priced for.
        revision: Branch, tag or commit of a hub id, as transformers has it.
        cache_dir: Folder that downloads are kept in.
        local_files_only: Whether to fetch nothing.
        token: The token for the hub; by default that of `hf auth login`.
        subfolder: Another model of a pipeline, such as "vae".
        **model_kwargs: Passed to the model class, such as `attn_implementation`.

    Returns:
        The model, in eval mode; `model.shardwright_report` says what was read, if weights were.

    Raises:
        PlanError: the plan is not for this model, or was edited since it was written.
        UsageError: `cp` is "local", and the plan splits no sequences; or there is no plan, and
            nothing to plan for; or `model` is no name.
        CheckpointError: weights are missing, surplus, damaged or of another shape.
        DistributedError: there are fewer ranks than the plan needs, the ranks were not given the
            same, or another rank failed.
    """
    if not isinstance(model, str | PathLike):
        raise UsageError(
            f"load reads the directory or hub id of a model, and was given a {type(model).__name__}"
            ": for a module that is built already there is shardwright.apply"
        )
    for theirs, ours in INSTEAD.items():
        if theirs in model_kwargs:
            raise UsageError(f"load has no {theirs}: give {ours}")
    dtype, where = as_dtype(dtype), pick_device(device)
    hub = Hub(revision, cache_dir, local_files_only, token, subfolder, trust_remote_code)
    wanted = {"dtype": dtype, "dequantize": bool(dequantize), **hub._asdict()}
    given = _plan_wanted(plan, tp, mesh, model, **wanted)

    def prepare(plan: Plan) -> Ready:
        own_rows = own_rows_wanted(cp, plan)
        checkpoint, out = _open_checkpoint(model, plan, weights, dtype, hub, model_kwargs)
        keep = plan.workload.quantized is not None if dequantize is None else not dequantize
        alike = {"dtype": str(dtype), "device": where.type, "model arguments": repr(model_kwargs)}
        alike["dequantize"] = str(not keep)
        if checkpoint is not None:
            alike["weights"] = checkpoint.digest()
        return Ready((checkpoint, out, own_rows, keep), alike, numbers_made(out, persistent=False))

    plan, ranks, ready = meet(given, mesh, where, timeout, "loading", prepare)
    checkpoint, out, own_rows, keep = ready
    options = {"dtype": dtype, "allow_surplus": allow_surplus, "progress": progress, "keep": keep}
    split_and_read(out, plan, ranks, checkpoint, where, **options)
    if own_rows:
        take_own_rows(out, ranks)
    return cast("LoadedModel", out.eval())


def split_and_read(
    model: nn.Module,
    plan: Plan,
    ranks: Mesh,
    checkpoint: Checkpoint | None,
    device: torch.device,
    **how: Any,
) -> None:
    """Split a model whose parameters are on meta, in place, and read this rank's part of them.

    Args:
        model: Whole, with real buffers; the plan is for it.
        plan: The plan.
        ranks: The mesh; all of its ranks call this.
        checkpoint: What is read; random numbers where there is none.
        device: Where parameters come to lie.
        **how: `dtype`, `allow_surplus`, `progress` and `keep`, as `load_weights` takes them.

    Raises:
        CheckpointError: on all ranks, where weights do not fit on one of them.
    """
    groups = groups_of(plan.mesh, ranks)
    built = getattr(getattr(model, "config", None), "dtype", None)
    conversions = Conversions(model, built)
    ranks = _split(model, plan, ranks)
    if checkpoint is None:
        without_weights(model, device)
    else:
        given = checkpoint, placements(model), ranks.coords
        report, failure = tried(
            lambda: load_weights(model, *given, device=device, conversions=conversions, **how)
        )
        agree("loading", failure, groups=groups)
        model.shardwright_report = report  # type: ignore[assignment]
    _finish(model, plan, ranks)


def _finish(model: nn.Module, plan: Plan, ranks: Mesh) -> None:
    """Make DTensors of local parameters, and average their gradients over copies."""
    make_dtensors(model, ranks)
    average_gradients(model, ranks, plan.batch_dims, (held.tensor for held in held_apart(model)))


def _open_checkpoint(
    name: str | Path,
    plan: Plan,
    weights: bool,
    dtype: torch.dtype | None,
    hub: Hub,
    model_kwargs: dict[str, Any],
) -> tuple[Checkpoint | None, nn.Module]:
    """The checkpoint, and the model that the plan is for, without memory for its parameters."""
    checkpoint = Checkpoint.open(name, hub) if weights else None
    stored = None if checkpoint is None else checkpoint.dtype
    config = read_config(name, hub)
    quantization = read_quantization(config)
    if quantization is not None:
        drop_quantization(config)
        stored = as_dtype(getattr(config, "dtype", None)) or stored
        if checkpoint is not None:
            checkpoint = checkpoint.dequantized(quantization, stored or torch.bfloat16)
    said = getattr(config, "dtype", None)
    chosen = dtype or stored or said
    if checkpoint is not None and dtype is None and _some_kept_wider(said, stored, checkpoint):
        chosen = said
    if not isinstance(config, PackageConfig):
        config.dtype = chosen  # by which transformers builds buffers, too
    with building(config, hub) as cls:
        model = empty_model(cls._from_config, config, dtype=chosen, **model_kwargs)
        compute_buffers(model)
    if isinstance(config, PackageConfig):
        vars(model)[BUILT_FROM] = config  # for `save`
    _refuse_other_model(model, plan)
    return checkpoint, _with_generation_config(model, name, hub)


def _some_kept_wider(said: Any, stored: torch.dtype | None, checkpoint: Checkpoint) -> bool:
    """Whether some weights are in the dtype `said`, while that of most bytes is wider."""
    if not isinstance(said, torch.dtype) or stored is None or said.itemsize >= stored.itemsize:
        return False
    return any(entry.dtype == said for entry in checkpoint.stored.values())


def _refuse_other_model(model: nn.Module, plan: Plan) -> None:
    """Check that the plan is for this model, and that all of it can be split.

    Raises:
        PlanError: it is not, or cannot be.
    """
    check_identity(model, plan)
    check_closures(model)


def _with_generation_config(model: nn.Module, name: str | Path, hub: Hub) -> nn.Module:
    """`model` with the generation settings that came with the checkpoint, if any did.

    Raises:
        CheckpointError: those cannot be read.
    """
    from transformers import GenerationConfig

    if not getattr(model, "can_generate", lambda: False)():
        return model
    file = Path(name) / "generation_config.json"
    try:
        if file.is_file() and not isinstance(read_json(file), dict):
            raise ValueError("it holds no JSON object")
        settings: Any = GenerationConfig.from_pretrained(name, **hub.options())
        model.generation_config = settings
    except Exception as error:  # whatever transformers raises on what it does not expect
        if file.is_file():
            text = first_line(error)
            raise CheckpointError(f"{file} cannot be used: {text:.300}") from None
        if not isinstance(error, OSError):  # none came with it
            raise
    return model


def apply(
    model: M,
    plan: Plan | str | Path | None = None,
    mesh: DeviceMesh | Mesh | None = None,
    *,
    tp: int | None = None,
    cp: Literal["whole", "local"] = WHOLE,
    timeout: float = 600.0,
) -> M:
    """Split a module at hand, in place: each rank keeps its part of every parameter that is split.

    Args:
        model: A whole module, the same on each rank, on a device or on meta.
        plan: The plan, or its file.
        mesh: A device mesh with a dim for each of the plan's; made if there is none, as `load`
            does. Over the dims that share a batch, gradients are averaged from then on (see
            `runtime/communication/replicas.py`).
        tp: In place of a plan: the first rank plans for so many ranks, as `load` does.
        cp: What each rank of `cp` passes from then on: "whole" sequences, or "local": its own rows
            of them, consecutive and in the order of the ranks (see `runtime/rows/own_rows.py`).
        timeout: Seconds until all ranks must have started, and for each later wait of theirs, if
            the mesh is made here.

    Returns:
        `model`.

    Raises:
        PlanError: the plan is for another model or another number of ranks, or was edited since it
            was written.
        UsageError: `cp` is "local", and the plan splits no sequences; or there is no plan, and
            nothing to plan for.
        DistributedError: the ranks were not given the same, or one of them failed.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"apply splits a module, and was given a {type(model).__name__}: for a directory or "
            "hub id there is shardwright.load"
        )
    where = next((p.device for p in model.parameters() if not p.is_meta), None)
    given = _plan_wanted(plan, tp, mesh, model)

    def prepare(plan: Plan) -> Ready:
        _refuse_other_model(model, plan)
        alike = {"model": facts.of_module(model)}
        return Ready(own_rows_wanted(cp, plan), alike, numbers_made(model, persistent=True))

    plan, ranks, own_rows = meet(given, mesh, where, timeout, "applying the plan", prepare)
    ranks = _split(model, plan, ranks)
    _finish(model, plan, ranks)
    if own_rows:
        take_own_rows(model, ranks)
    return model


def _plan_wanted(
    plan: Plan | str | Path | None,
    tp: int | None,
    mesh: DeviceMesh | Mesh | None,
    model: Any,
    **options: Any,
) -> Plan | Unplanned:
    """Return the plan that is to be applied, or what `tp` or a mesh alone asks for.

    Args:
        plan: The plan, or its file.
        tp: Ranks to plan for.
        mesh: The mesh, which may be planned for.
        model: What to plan.
        **options: How to plan it.

    Raises:
        PlanError: the plan cannot be read, or was edited since it was written.
        UsageError: there is neither a plan nor what to plan for, or both.
    """
    if plan is not None:
        if tp is not None or isinstance(plan, int):
            raise UsageError("give either a plan or its file, or tp=2 to plan for 2 ranks")
        if isinstance(plan, Plan):
            return plan.unedited()
        return Plan.load(plan).unedited(plan)
    if tp is not None:
        dims = read_mesh(tp, None)
    elif isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names:
        dims = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    else:
        raise UsageError("give a plan, its file, or the number of ranks to plan for, as tp=2")
    # Through the package, since runtime/ may not import the planner, which is above it.
    return Unplanned(dims, lambda: shardwright.plan(model, mesh=dims, **options))


def _split(model: nn.Module, plan: Plan, mesh: Mesh) -> Mesh:
    """Split `model` over `mesh`, which is given back with groups for the plan's sub-axes."""
    mesh = mesh.with_sub_axes(plan.sub_axes)
    apply_modules(model, plan, mesh)
    recompute_blocks(model, plan.workload.recomputed)
    model._shardwright_mesh = mesh  # type: ignore[assignment]
    if debug.wanted():
        debug.watch(model, mesh.process_groups(plan.mesh.keys() - {*plan.batch_dims}))
    return mesh


def save(
    model: nn.Module,
    directory: str | Path,
    max_shard_size: int | str = "5GB",
    dequantize: bool = False,
) -> None:
    """Write a split model whole, so that plain transformers loads it; all ranks call this.

    Files of a tokenizer or processor that lie beside the checkpoint that was loaded are copied, if
    that is a local directory.

    Args:
        model: A model that a plan was applied to; of peft's wrapper around one, the adapters.
        directory: Where to; files appear in it only when all is written.
        max_shard_size: Bytes, or a number with KB, MB or GB, of one file.
        dequantize: Write dense weights, and a config without quantization. By default weights that
            are held as a quantized checkpoint stores them are written so again, byte for byte.

    Raises:
        PlanError: no plan was applied to `model`.
        CheckpointError: the directory cannot be written.
        UsageError: `directory` is no name.
    """
    if not isinstance(directory, str | PathLike) or not str(directory):
        raise UsageError(f"save writes into a directory, and was given {directory!r:.40}")
    if not isinstance(model, nn.Module):
        raise UsageError(f"save writes a split model, and was given a {type(model).__name__}")
    mesh = mesh_of(model)
    if mesh is None:
        raise PlanError(f"this {type(model).__name__} is not split: save it with save_pretrained")
    if is_adapted(model):
        return save_adapters(model, directory)
    write.save(model, directory, placements(model), mesh, max_shard_size, dequantize)
