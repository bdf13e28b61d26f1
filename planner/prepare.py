"""`prepare` reads and traces a model, and returns the task of planning it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, get_args

import torch

from shardwright.errors import ModelError, PlanError, UsageError
from shardwright.planner.contract.consistency import LARGEST
from shardwright.planner.contract.mesh import CP, EP, TP, read_mesh, replicas
from shardwright.planner.contract.names import dtype_name, fold, is_batched
from shardwright.planner.contract.plan_figures import (
    MAX_IMBALANCE,
    DataParallel,
    Phase,
    Quantized,
    Workload,
)
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.cost.phases import parse_phases
from shardwright.planner.devices.device import ranks_on_a_host
from shardwright.planner.garbage import uncollected
from shardwright.planner.problem.pins import as_pins
from shardwright.planner.problem.tp_plan import pins as hand_written_pins
from shardwright.planner.problem.tp_plan import table_of
from shardwright.planner.search.task import Task
from shardwright.planner.search.traced_model import TracedModel
from shardwright.planner.search.unequal import Sharing
from shardwright.planner.stages import stage
from shardwright.planner.trace.model.python_references import is_code
from shardwright.planner.trace.model.source import Source, read_source
from shardwright.planner.trace.trace_lock import not_in_model_code
from shardwright.runtime.model.build import as_dtype
from shardwright.runtime.model.hub import Hub

DEVICE = "h100-nvlink"
"""The device profile by default."""

BY_RANK = ("shares", "speeds", "memories")
"""Keys of a plan's workload with a number for each rank of tp, where these differ."""


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
        "continuous_batching": any(is_batched(call.state) for call in plan.calls),
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

    For None, ranks have the parts that the workload says. `how` holds the other arguments of
    `read`.

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
            f"dp={dp!r}: it must be 'ddp', or 'fsdp' on a mesh with copies of the model, such as "
            "dp=2,tp=4"
        )
    along, phases = how.get("sequence_parallel"), parse_phases(how.get("phase", "prefill"))
    if cp > 1 and (along or "decode" in phases):
        asked = "sequence_parallel" if along else "phase 'decode'"
        raise UsageError(
            f"{asked} cannot be combined with cp={cp}, which shards sequences already and keeps no "
            f"KV cache: plan with cp=1, or without {asked}"
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
            "speeds, or a memory limit for each rank, cannot be combined with cp, ep or dp='fsdp': "
            "plan without these"
        )


def _check_spread(mesh: Mapping[str, int], dp: DataParallel) -> None:
    """Check that experts may be spread over `ep` on this mesh.

    Raises:
        UsageError: they may not, together with something else that is asked for.
    """
    if mesh.get(CP, 1) > 1:
        raise UsageError("ep cannot be combined with cp: leave out one of them")
    if dp == "fsdp":
        raise UsageError(
            "ep cannot be combined with dp='fsdp', because copies over ep average their gradients: "
            "plan with dp='ddp'"
        )


def read(
    model: Any,
    batch: int,
    *,
    args: tuple[Any, ...] | torch.Tensor | None = (),
    kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
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
    until: float = math.inf,
    **hub: Any,
) -> TracedModel:
    """Read a model, to be traced and planned for one mesh or several.

    `until` is that of the `TracedModel`. `hub` holds the arguments for the hub, and
    `trust_remote_code`.

    Raises:
        UsageError: an argument is invalid.
        ModelError: the model cannot be read.
    """
    for name, value in (("batch", batch), ("seq", seq), ("optimizer_bytes", optimizer_bytes)):
        least = 0 if name == "optimizer_bytes" else 1
        if not least <= value <= LARGEST:
            raise UsageError(f"{name} must be from {least} to {LARGEST:,}")
    if not 1 <= expert_imbalance <= MAX_IMBALANCE:
        raise UsageError(f"expert_imbalance must be from 1 to {MAX_IMBALANCE:,}")
    counts = recompute.values() if isinstance(recompute, Mapping) else ()
    asked = isinstance(recompute, bool | Mapping | None)
    if not (asked and all(type(n) is int for n in counts)):
        raise UsageError(f"recompute must be True, False or numbers of blocks, not {recompute!r}")
    phases = parse_phases(phase)
    if recompute and "train" not in phases:
        raise UsageError("recompute is for training: plan with phase 'train', or without it")
    wanted = dict(pins or {})
    as_pins(wanted)  # raises on invalid pins before the trace, which takes long
    stage("read")
    given = model, args, kwargs, dtype, Hub(**hub)
    source = read_source(*given, dequantize, continuous_batching)
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
    return TracedModel(source, workload, as_pins(wanted), sequence_parallel, recompute, until)


def _quantized(source: Source) -> Quantized | None:
    """Return what a plan says of weights that are held as they are stored."""
    if source.quantization is None:
        return None
    bits = {name: float(packing.bits) for name, packing in source.quantized.items()}
    blocks = {name: [*packing.block] for name, packing in source.quantized.items()}
    names = [name for name, _ in source.module.named_parameters(remove_duplicate=False)]
    method = source.quantization.method
    return Quantized(method=method, bits=fold(bits, names), blocks=fold(blocks, names))


def refuse_other_dtype(model: Any, asked: torch.dtype | str | None, found: torch.dtype) -> None:
    """Refuse a dtype that a module does not have: only what is built here is given one.

    Raises:
        UsageError: the module has another dtype.
    """
    is_module = isinstance(model, torch.nn.Module) or is_code(model)
    if is_module and (as_dtype(asked) or found) != found:
        raise UsageError(
            f"dtype: the module has {found}, not {as_dtype(asked)}: convert it first, as in "
            f"model.to({as_dtype(asked)}), or leave out the dtype"
        )
