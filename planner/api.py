"""`plan` derives a checked and dry-run plan from a model; `prepare` only reads and traces it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, get_args

import torch

from shardwright.errors import ModelError, PlanError, UsageError
from shardwright.planner.contract.consistency import LARGEST
from shardwright.planner.contract.mesh import CP, EP, TP, read_mesh, replicas
from shardwright.planner.contract.names import PAGED, dtype_name, fold
from shardwright.planner.contract.plan_figures import (
    MOST_IMBALANCE,
    DataParallel,
    ObjectiveName,
    Phase,
    Quantized,
    Workload,
)
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.cost.phases import parse_phases
from shardwright.planner.devices.device import ranks_on_a_host
from shardwright.planner.dump.write import dumping
from shardwright.planner.garbage import uncollected
from shardwright.planner.problem.pins import as_pins
from shardwright.planner.problem.tp_plan import pins as hand_written_pins
from shardwright.planner.problem.tp_plan import table_of
from shardwright.planner.search.meshes import Cluster, choose_mesh
from shardwright.planner.search.solution import SolverOptions
from shardwright.planner.search.task import Task
from shardwright.planner.search.traced_model import TracedModel
from shardwright.planner.search.unequal import Sharing, search_shares
from shardwright.planner.stages import stage
from shardwright.planner.trace.model.source import Source, read_source
from shardwright.planner.trace.trace_lock import not_in_model_code
from shardwright.runtime.model.hub import Hub

DEVICE = "h100-nvlink"
"""The device profile by default."""

BY_RANK = ("shares", "speeds", "memories")
"""Keys of a plan's workload with a number for each rank of tp, where these differ."""


@not_in_model_code
@uncollected()
def plan(
    model: Any,
    tp: int | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: dict[str, Any] | None = None,
    objective: ObjectiveName = "time",
    memory: int | Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    solver: str | None = None,
    time_limit: float = 60.0,
    batch: int | None = None,
    seq: int = 512,
    dtype: torch.dtype | str | None = None,
    device: str = DEVICE,
    gpus_per_host: int | None = None,
    cluster: Cluster | None = None,
    pins: Mapping[str, str] | None = None,
    phase: str | Mapping[Phase, int] = "prefill",
    tp_plan: Mapping[str, object] | str | None = None,
    sequence_parallel: bool | None = None,
    recompute: bool | Mapping[str, int] | None = None,
    continuous_batching: bool = False,
    optimizer_bytes: int = 8,
    expert_imbalance: float = 1,
    dp: DataParallel = "ddp",
    dump: str | Path | None = None,
    write_model: str | Path | None = None,
    dequantize: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    subfolder: str | None = None,
) -> Plan:
    """Return the cheapest correct plan that shards `model` over ranks. No weights are read.

    Args:
        model: Hub id, local directory (of transformers, diffusers or timm, or a pipeline),
            transformers config, `nn.Module`, `timm/NAME`, or the name of code that makes one:
            "package.module:name" or "file.py:name".
        tp: Number of tensor-parallel ranks; short for `mesh={"tp": tp}`.
        mesh: Mesh dims and their ranks. "tp" shards the model, "cp" shards sequences, all others
            share the batch: {"dp": 2, "tp": 4} is two copies of the model over four ranks each.
        args: Example inputs as a tuple, or a single tensor. Needed for a module that is not a
            transformers text model. Sizes that vary at run time should be 3 (batch) and 19
            (sequence). Where the code computes sizes from integer inputs (a grid of patches, the
            positions of an image), these must be valid and not on meta.
        kwargs: Example inputs by name.
        objective: What is minimised. "time": the predicted time of the phases, plus a price for
            each byte that a rank holds, because free memory is room for more sequences (see
            `planner/problem/optimize.py`). "memory": bytes, with 5 % to spare where that saves
            time; if `memory` is given, time under that limit.
        memory: Bytes that a rank may hold: parameters, buffers, KV cache, activations, and training
            state (see `planner/cost/memory.py`). For least time the default is the memory of the
            device. If no plan fits the device, the plan is for least memory and has a note. A
            number for each rank of tp, if they differ: if one cannot hold its part, those with more
            memory get larger parts.
        speeds: How fast each rank of tp is, in shares of `device`, if they differ: faster ranks get
            larger parts.
        solver: Name of an installed solver: "cpsat" (the default), "backtracking", or a plugin.
            If it cannot prove its plan in time, the plan of backtracking is used.
        time_limit: Seconds for all planning. A solver gets what reading and tracing the model leave
            of them, at least a tenth.
        batch: Sequences in the priced passes, over all copies of the model. The default is one
            per copy.
        seq: Tokens in each sequence; for decoding, tokens in the KV cache of each sequence.
        dtype: Dtype of the parameters, or its name. The default, or "auto", is the config's.
        device: Name of the device profile for the prices, or a .json file with one, which
            `calibrate` writes.
        gpus_per_host: Ranks on one host, where `mesh` has more: its last dims are innermost, as
            torchrun numbers ranks. The default is that of the device profile.
        cluster: Hosts and GPUs to choose the mesh for, instead of `tp` or `mesh`. The plan is that
            of the fastest mesh that fits; `Plan.meshes` has the others. The default of `batch` is
            then one sequence per GPU.
        pins: Name -> "replicate" (unsharded on every rank) or "shard:DIM" (sharded along that dim).
            The name is that of a parameter, or of a module and stands for all its parameters. `*`
            stands for any part of a name between dots:
            {"model.layers.*.mlp": "replicate", "lm_head.weight": "shard:0"}.
        tp_plan: A tensor-parallel plan of transformers, or "auto" for the model's own. Its
            placements of parameters become pins, unless `pins` has the same name.
        phase: What is priced: "prefill", "decode" (one new token a sequence), "train" (forward and
            backward), or several, optionally with how often each runs:
            "prefill,decode:128", or {"prefill": 1, "decode": 128}.
        sequence_parallel: Whether to shard hidden states between blocks along the sequence. That
            takes fewer bytes of activations on a rank, and reduce-scatter and all-gather instead of
            all-reduce. By default this is tried where no plan fits `memory` without it; the plan
            then has a note.
        recompute: Whether blocks keep only their inputs in training and are computed again in the
            backward pass (activation checkpointing), or how many of the first blocks of each list
            ({"model.layers": 24}). By default as many as are needed to fit the memory. The runtime
            does as the plan says.
        continuous_batching: Whether the plan must also hold for transformers' continuous batching
            (`generate_batch`, and servers that use it), whose keys and values are in a paged cache.
        optimizer_bytes: Bytes of optimizer state for each element of a parameter, for training:
            8 for Adam's two in float32, 12 with a float32 copy of the parameter.
        expert_imbalance: With experts spread over "ep": the tokens that the rank with most of them
            gets, in shares of the average.
        dp: What the copies of the model do. "ddp": each holds everything, and gradients are
            averaged. "fsdp": torch's `fully_shard` is put around the split model, shards
            parameters, gradients and optimizer state over the copies, and gathers as it goes. With
            `cluster` both are compared, for training.
        dump: Folder in which to write, as text, what the planner saw and decided.
        write_model: File for the CP-SAT model, in CP-SAT's text format. It has an integer for each
            axis of a tensor (the sub-axes it is split over) and for what is Partial over each.
        dequantize: Whether weights of a quantized checkpoint are to be held dense, in `dtype`. By
            default they are held as they are stored, frozen, and computed at each use.
        trust_remote_code: Whether to run code that comes with the model; by default it is refused.
        revision: Branch, tag or commit of a hub id, as in transformers.
        cache_dir: Folder for downloads.
        local_files_only: Whether to download nothing.
        token: Access token for the hub. The default is that of `hf auth login`.
        subfolder: The model of a pipeline that is planned, such as "vae"; by default its denoiser.

    Raises:
        UsageError: an argument is invalid.
        ModelError: the model cannot be read or traced.
        InfeasibleError: no plan fits the memory (the message has the least that would), the pins
            cannot hold, or hidden states cannot be sharded along the sequence (the message has the
            reason).
        SolverError: the solver is missing or found nothing in time.
    """
    began = time.monotonic()
    if objective not in get_args(ObjectiveName):
        raise UsageError(f"objective must be 'time' or 'memory', not {objective!r}")
    how: dict[str, Any] = {
        "args": args, "kwargs": kwargs, "seq": seq, "dtype": dtype, "device": device, "pins": pins,
        "tp_plan": tp_plan, "phase": phase, "sequence_parallel": sequence_parallel,
        "recompute": recompute, "continuous_batching": continuous_batching,
        "optimizer_bytes": optimizer_bytes, "expert_imbalance": expert_imbalance,
        "dequantize": dequantize,
        "trust_remote_code": trust_remote_code, "revision": revision, "cache_dir": cache_dir,
        "local_files_only": local_files_only, "token": token, "subfolder": subfolder,
    }  # fmt: skip
    memories = () if isinstance(memory, int | None) else tuple(memory)
    least = memory if isinstance(memory, int | None) else None
    asked = SolverOptions(solver, time_limit, least, objective, began)
    if cluster is not None:
        if (tp, mesh, gpus_per_host) != (None, None, None):
            raise UsageError("give tp or mesh, or a cluster to choose the mesh for, not both")
        if memories or speeds:
            raise UsageError("ranks that differ, and a cluster: give tp or mesh instead")
        found = read(model, cluster.ranks if batch is None else batch, **how)
        return choose_mesh(found, cluster, asked, lambda t: dumping(dump, t, write_model)).plan
    how |= {"mesh": mesh, "batch": batch, "dp": dp, "gpus_per_host": gpus_per_host}
    sharing = prepare_shares(model, tp, memories=memories, speeds=speeds or (), **how)
    task = sharing(None)
    with dumping(dump, task, write_model) as tell:
        return search_shares(task, sharing, asked, tell).plan


def as_planned(plan: Plan) -> dict[str, Any]:
    """Return the arguments of `prepare` that give a plan's mesh, workload and pins.

    `plan` takes them, too, if all ranks are alike.

    Raises:
        PlanError: torch has no such dtype.
    """
    load = plan.workload
    dtype = getattr(torch, load.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"workload.dtype: torch has no '{load.dtype:.40}'")
    return {
        "mesh": plan.mesh, "batch": load.batch, "seq": load.seq, "phase": load.phases,
        "dtype": dtype, "device": load.device, "pins": plan.pins,
        "sequence_parallel": load.sequence_parallel, "recompute": load.recomputed or False,
        "optimizer_bytes": load.optimizer_bytes,
        "expert_imbalance": load.imbalance,
        "continuous_batching": any(PAGED in call.state for call in plan.calls),
        "dp": load.dp, "dequantize": load.quantized is None,
        "gpus_per_host": load.gpus_per_host or plan.world_size,
        **{name: given for name in BY_RANK if (given := getattr(load, name))},
    }  # fmt: skip


@not_in_model_code
@uncollected()
def prepare(model: Any, tp: int | None = None, **how: Any) -> Task:
    """Read and trace a model, and return the task of planning it. `plan` does this before solving.

    `how` holds the other arguments of `prepare_shares`.

    Raises:
        UsageError, ModelError, InfeasibleError: as `prepare_shares`.
    """
    return prepare_shares(model, tp, **how)(None)


@not_in_model_code
@uncollected()
def prepare_shares(
    model: Any,
    tp: int | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    batch: int | None = None,
    dp: DataParallel = "ddp",
    gpus_per_host: int | None = None,
    speeds: Sequence[float] = (),
    memories: Sequence[int] = (),
    **how: Any,
) -> Sharing:
    """Read a model, and return the tasks of planning it, by the parts that ranks of tp get.

    None are the parts that are given. `how` holds the other arguments of `read`.

    Raises:
        UsageError: an argument is invalid.
        ModelError: the model cannot be read or traced.
        InfeasibleError: sequences are to be sharded, and the model has none between its blocks.
    """
    dims = read_mesh(tp, mesh)
    copies, cp = replicas(dims), dims.get(CP, 1)
    batch = copies if batch is None else batch
    if 0 < batch < copies:  # `read` refuses others
        raise UsageError(f"a batch of {batch} cannot be shared by {copies} copies of the model")
    if dp not in get_args(DataParallel) or (dp == "fsdp" and copies == 1):
        raise UsageError(
            f"dp={dp!r}: 'ddp', or 'fsdp' where a mesh has copies to share out a model over, as "
            "dp=2,tp=4 has"
        )
    along, phases = how.get("sequence_parallel"), parse_phases(how.get("phase", "prefill"))
    if cp > 1 and (along or "decode" in phases):
        asked = "sequence_parallel" if along else "phase 'decode'"
        raise UsageError(
            f"{asked} and cp={cp}: cp splits sequences of a forward and backward pass by itself, "
            "and keeps no KV cache: plan with cp=1, or without"
        )
    if dims.get(EP, 1) > 1:
        _check_spread(dims, dp)
    if speeds or memories:
        _check_unlike(dims, dp, speeds, memories)
    per_host = ranks_on_a_host(how.get("device", DEVICE), prod(dims.values()), gpus_per_host)
    found = read(model, batch, speeds=speeds, memories=memories, **how)
    return partial(found.on, dims, dp, per_host)


def _check_unlike(
    mesh: Mapping[str, int], dp: DataParallel, speeds: Sequence[float], memories: Sequence[int]
) -> None:
    """Check what is given for each rank of tp.

    Raises:
        UsageError: there are not as many as ranks, or one is invalid.
    """
    for name, values in (("speeds", speeds), ("memory", memories)):
        if values and len(values) != mesh[TP]:
            raise UsageError(f"{name}: {len(values)} numbers for tp={mesh[TP]} ranks")
        if not all(0 < value < math.inf for value in values):
            raise UsageError(f"{name}: each must be above 0, and finite")
    if dp == "fsdp" or mesh.get(CP, 1) * mesh.get(EP, 1) > 1:
        raise UsageError(
            "ranks of tp that differ do not go with cp, ep or dp='fsdp': plan without these"
        )


def _check_spread(mesh: Mapping[str, int], dp: DataParallel) -> None:
    """Check that experts may be spread over `ep` on this mesh.

    Raises:
        UsageError: they may not, together with something else that is asked for.
    """
    if mesh.get(CP, 1) > 1:
        raise UsageError("ep and cp: no plan spreads experts and splits sequences, leave out one")
    if dp == "fsdp":
        raise UsageError(
            "ep and dp='fsdp': the copies of a model whose experts are spread average gradients, "
            "plan with dp='ddp'"
        )


def read(
    model: Any,
    batch: int,
    *,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: dict[str, Any] | None = None,
    seq: int = 512,
    dtype: torch.dtype | str | None = None,
    device: str = DEVICE,
    pins: Mapping[str, str] | None = None,
    tp_plan: Mapping[str, object] | str | None = None,
    phase: str | Mapping[Phase, int] = "prefill",
    sequence_parallel: bool | None = None,
    recompute: bool | Mapping[str, int] | None = None,
    continuous_batching: bool = False,
    optimizer_bytes: int = 8,
    expert_imbalance: float = 1,
    shares: Sequence[int] = (),
    speeds: Sequence[float] = (),
    memories: Sequence[int] = (),
    dequantize: bool = False,
    trust_remote_code: bool = False,
    **hub: Any,
) -> TracedModel:
    """Read a model, to be traced and planned for one mesh or several.

    `hub` holds the arguments for the hub: `revision`, `cache_dir`, `local_files_only`, `token`.

    Raises:
        UsageError: an argument is invalid.
        ModelError: the model cannot be read.
    """
    for name, value in (("batch", batch), ("seq", seq), ("optimizer_bytes", optimizer_bytes)):
        least = 0 if name == "optimizer_bytes" else 1
        if not least <= value <= LARGEST:
            raise UsageError(f"{name} must be from {least} to {LARGEST:,}")
    if not 1 <= expert_imbalance <= MOST_IMBALANCE:
        raise UsageError(f"expert_imbalance must be from 1 to {MOST_IMBALANCE:,}")
    counts = recompute.values() if isinstance(recompute, Mapping) else ()
    asked = isinstance(recompute, bool | Mapping | None)
    if not (asked and all(type(n) is int for n in counts)):
        raise UsageError(f"recompute must be True, False or numbers of blocks, not {recompute!r}")
    phases = parse_phases(phase)
    wanted = dict(pins or {})
    as_pins(wanted)  # raises on invalid pins before the trace, which takes long
    stage("read")
    source = read_source(
        model, args, kwargs, dtype, trust_remote_code, Hub(**hub), dequantize, continuous_batching
    )
    for name, parameter in source.module.named_parameters():
        if max(parameter.shape, default=0) > LARGEST or parameter.numel() >= 2**60:
            raise ModelError(
                f"parameter '{name}' has shape {list(parameter.shape)}: plans are for sizes up to "
                f"{LARGEST:,}, and less than 2^60 elements"
            )
    if tp_plan is not None:
        wanted = hand_written_pins(table_of(tp_plan, source.module), source.module) | wanted
    workload = Workload(
        batch=batch,
        seq=seq,
        dtype=dtype_name(source.dtype),
        device=device,
        phases=phases,
        optimizer_bytes=optimizer_bytes,
        imbalance=expert_imbalance,
        shares=[*shares],
        speeds=[*map(float, speeds)],
        memories=[*memories],
        quantized=_quantized(source),
    )
    return TracedModel(source, workload, as_pins(wanted), sequence_parallel, recompute)


def _quantized(source: Source) -> Quantized | None:
    """Return what a plan says of weights that are held as they are stored."""
    if source.quantization is None:
        return None
    bits = {name: float(packing.bits) for name, packing in source.quantized.items()}
    blocks = {name: [*packing.block] for name, packing in source.quantized.items()}
    names = [name for name, _ in source.module.named_parameters(remove_duplicate=False)]
    method = source.quantization.method
    return Quantized(method=method, bits=fold(bits, names), blocks=fold(blocks, names))
