"""`plan`: the whole way from a model to a plan that was checked and tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from shardwright.errors import ModelError, PlanError, UsageError
from shardwright.planner.contract.consistency import LARGEST
from shardwright.planner.contract.mesh import CP, TP, read_mesh, replicas
from shardwright.planner.contract.plan_figures import DataParallel, ObjectiveName, Phase, Workload
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.cost.phases import parse_phases
from shardwright.planner.dump.write import dumping
from shardwright.planner.garbage import uncollected
from shardwright.planner.graph.axes import refine
from shardwright.planner.graph.trace_sizes import TRACE_SEQ
from shardwright.planner.problem.pins import Pin, as_pins
from shardwright.planner.problem.tp_plan import pins as hand_written_pins
from shardwright.planner.problem.tp_plan import table_of
from shardwright.planner.search.ladder import run
from shardwright.planner.search.solution import SolverOptions
from shardwright.planner.search.task import Task
from shardwright.planner.stages import stage
from shardwright.planner.strategies.sequence import open_sequence
from shardwright.planner.trace.model.source import Source, read_source
from shardwright.planner.trace.trace import trace_model
from shardwright.planner.trace.trace_lock import apart
from shardwright.runtime.model.hub import Hub


@apart
@uncollected()
def plan(
    model: Any,
    tp: int | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: dict[str, Any] | None = None,
    objective: ObjectiveName = "time",
    memory: int | None = None,
    solver: str | None = None,
    time_limit: float = 60.0,
    batch: int | None = None,
    seq: int = 512,
    dtype: torch.dtype | None = None,
    device: str = "h100-nvlink",
    pins: Mapping[str, str] | None = None,
    phase: str | Mapping[Phase, int] = "prefill",
    tp_plan: Mapping[str, object] | str | None = None,
    sequence_parallel: bool | None = None,
    optimizer_bytes: int = 8,
    dp: DataParallel = "ddp",
    dump: str | Path | None = None,
    write_model: str | Path | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
) -> Plan:
    """The cheapest correct way to split `model` over ranks; no weights are read.

    Args:
        model: Hub id, local directory, transformers config, `nn.Module`, or the name of code that
            makes one: "package.module:name" or "file.py:name".
        tp: Ranks to split over; short for `mesh={"tp": tp}`.
        mesh: Mesh dims and their ranks: "tp" splits the model, all others share the batch:
            {"dp": 2, "tp": 4} is two copies of a model over four ranks each.
        args: Example inputs, or the only one, needed for a module that is no transformers text
            model. Let sizes that vary at run time be 3 (batch) and 19 (sequence). Where code
            computes sizes from integers among them (a grid of patches, the places of an image),
            they must be valid, and not on meta.
        kwargs: Example inputs by name.
        objective: What is to be least. "time": the predicted time of the phases, where a byte that
            a rank holds counts as the part of it that its room for more sequences is worth (see
            `planner/problem/optimize.py`). "memory": bytes, with 5 % to spare where that saves
            time; where `memory` is given, time.
        memory: Bytes that a rank may hold: parameters, buffers, KV cache, activations, and what
            training needs (see `planner/cost/memory.py`). By default, for least time, what the
            device has; where nothing fits that, the plan is for least memory, and has a note.
        solver: Name of an installed solver: "cpsat" (the default), "backtracking", or
            another's. Where it cannot prove its plan in time, backtracking's plan stands.
        time_limit: Seconds for the solver.
        batch: Sequences in the passes that are priced, of all copies of the model together; by
            default one each.
        seq: Tokens in each of them; when decoding, in the KV cache of each.
        dtype: Of the parameters; else the config's own.
        device: Name of the device profile that is priced, or a file with one (`calibrate` writes
            such), which ends in .json.
        pins: Parameters, or modules with all parameters below -> "replicate" (whole on every rank)
            or "shard:DIM" (split along that dim). `*` stands for any part of a name between dots:
            {"model.layers.*.mlp": "replicate", "lm_head.weight": "shard:0"}.
        tp_plan: A tensor-parallel plan of transformers, or "auto" for the model's own: how it
            splits parameters becomes pins, where `pins` has none of the same name.
        phase: What is priced: "prefill", "decode" (one new token a sequence), "train" (forward and
            backward), or several, maybe with how often each is run:
            "prefill,decode:128", or {"prefill": 1, "decode": 128}.
        sequence_parallel: Split hidden states between blocks along the sequence: fewer bytes of
            activations on a rank, reduce-scatter and all-gather instead of all-reduce. By default
            where no plan fits `memory` without it; the plan has a note then.
        optimizer_bytes: State that the optimizer keeps for an element of a parameter, if training:
            8 for Adam's two in float32, 12 with a float32 copy of the parameter.
        dp: What the copies of a mesh with several do. "ddp": each holds all, and gradients are
            averaged. "fsdp": torch's `fully_shard`, which is put around the split model, shares out
            parameters, gradients and optimizer state over them, and gathers as it goes.
        dump: A folder to write what the planner saw and decided into, as text.
        write_model: A file for the CP-SAT model, in CP-SAT's text format: an integer for each axis
            of a tensor, over which sub-axes it is split, and for what is Partial over each.
        trust_remote_code: Whether to run code that comes with the model: else that is refused.
        revision: Branch, tag or commit of a hub id, as transformers has it.
        cache_dir: Folder that downloads are kept in.
        local_files_only: Whether to fetch nothing.
        token: Of who asks the hub; by default that of `hf auth login`.

    Raises:
        UsageError: an argument that cannot be meant.
        ModelError: the model cannot be read or traced.
        InfeasibleError: no plan fits, and the message says the least that would; or the pins cannot
            hold, or hidden states cannot be split along the sequence, and it says what forbids it.
        SolverError: the solver is missing or found nothing in time.
    """
    if objective not in get_args(ObjectiveName):
        raise UsageError(f"objective must be 'time' or 'memory', not {objective!r}")
    task = prepare(
        model, tp, mesh=mesh, args=args, kwargs=kwargs, batch=batch, seq=seq, dtype=dtype,
        device=device, pins=pins, tp_plan=tp_plan, phase=phase, sequence_parallel=sequence_parallel,
        optimizer_bytes=optimizer_bytes, dp=dp, trust_remote_code=trust_remote_code,
        revision=revision, cache_dir=cache_dir, local_files_only=local_files_only, token=token,
    )  # fmt: skip
    with dumping(dump, task, write_model) as tell:
        return run(task, SolverOptions(solver, time_limit, memory, objective), tell)


def as_planned(plan: Plan) -> dict[str, Any]:
    """The arguments of `plan` and `prepare` that ask for a plan's mesh, workload and pins again.

    Raises:
        PlanError: its dtype is none.
    """
    load = plan.workload
    dtype = getattr(torch, load.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"workload.dtype: torch has no '{load.dtype:.40}'")
    return {
        "mesh": plan.mesh, "batch": load.batch, "seq": load.seq, "phase": load.phases,
        "dtype": dtype, "device": load.device, "pins": plan.pins,
        "sequence_parallel": load.sequence_parallel, "optimizer_bytes": load.optimizer_bytes,
        "dp": load.dp,
    }  # fmt: skip


@apart
@uncollected()
def prepare(
    model: Any,
    tp: int | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: dict[str, Any] | None = None,
    batch: int | None = None,
    seq: int = 512,
    dtype: torch.dtype | None = None,
    device: str = "h100-nvlink",
    pins: Mapping[str, str] | None = None,
    tp_plan: Mapping[str, object] | str | None = None,
    phase: str | Mapping[Phase, int] = "prefill",
    sequence_parallel: bool | None = None,
    optimizer_bytes: int = 8,
    dp: DataParallel = "ddp",
    trust_remote_code: bool = False,
    **hub: Any,
) -> Task:
    """Read and trace a model: all that `plan` does before it looks for the cheapest way.

    `hub` says where a hub id leads: `revision`, `cache_dir`, `local_files_only`, `token`.

    Raises:
        UsageError: an argument that cannot be meant.
        ModelError: the model cannot be read or traced.
        InfeasibleError: the model has no sequence to split between blocks, if it is to be split.
    """
    dims = read_mesh(tp, mesh)
    copies = replicas(dims)
    batch = copies if batch is None else batch
    for name, value in (("batch", batch), ("seq", seq), ("optimizer_bytes", optimizer_bytes)):
        least = 0 if name == "optimizer_bytes" else 1
        if not least <= value <= LARGEST:
            raise UsageError(f"{name} must be from {least} to {LARGEST:,}")
    if batch < copies:
        raise UsageError(f"a batch of {batch} cannot be shared by {copies} copies of the model")
    if dp not in get_args(DataParallel) or (dp == "fsdp" and copies == 1):
        raise UsageError(
            f"dp={dp!r}: 'ddp', or 'fsdp' where a mesh has copies to share out a model over, as "
            "dp=2,tp=4 has"
        )
    phases, cp = parse_phases(phase), dims.get(CP, 1)
    if cp > 1 and (sequence_parallel or "decode" in phases):
        asked = "sequence_parallel" if sequence_parallel else "phase 'decode'"
        raise UsageError(
            f"{asked} and cp={cp}: cp splits sequences of a forward and backward pass by itself, "
            "and keeps no KV cache: plan with cp=1, or without"
        )
    wanted = dict(pins or {})
    as_pins(wanted)  # what cannot be meant should not wait for the trace
    stage("read")
    source = read_source(model, args, kwargs, dtype, trust_remote_code, Hub(**hub))
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
        dtype=str(source.dtype).removeprefix("torch."),
        device=device,
        phases=phases,
        replicas=copies,
        sequence_parallel=bool(sequence_parallel),
        optimizer_bytes=optimizer_bytes,
        dp=dp,
    )
    pinned = as_pins(wanted)
    several = dims[TP] > 1 == cp and phases.keys() != {"decode"}  # ranks, and tokens to share
    if sequence_parallel is not None or not several:
        return _traced(source, workload, dims, pinned)
    along = workload.model_copy(update={"sequence_parallel": True})
    again = partial(_traced, source, along, dims, pinned)
    return _traced(source, workload, dims, pinned, along=again)


def _traced(
    source: Source,
    workload: Workload,
    mesh: Mapping[str, int],
    pins: tuple[Pin, ...],
    folds: bool = True,
    along: Callable[[], Task] | None = None,
) -> Task:
    """Trace a model and find its axes; with all its blocks where their code asks for their number.

    Along sequences that is its plain call, and that with a mask for padding: what others are as
    long as is not known.
    """
    stage("trace")
    wanted, cp = replace(source, trains="train" in workload.phases), mesh.get(CP, 1)
    splits = workload.sequence_parallel or cp > 1
    if splits:
        wanted = wanted.along_sequence(by_rows=cp > 1)
    traced, folding, unfolded = trace_model(wanted, pins, splits, folds)
    unmasked = bool(wanted.masks() - traced.masks())
    stage("axes")
    length = TRACE_SEQ if splits else None
    axes = refine(folding.graph, length)
    sequence = open_sequence(folding.graph, axes, length, cp == 1) if length else None
    stage("trace")
    task = Task(traced, folding, unfolded, axes, workload, mesh, pins, sequence, unmasked, along)
    if task.numbered:
        return _traced(source, workload, mesh, pins, folds=False, along=along)
    return task
