"""`plan` derives a checked and dry-run plan from a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from shardwright.errors import UsageError
from shardwright.planner import solvers
from shardwright.planner.arguments import check_types
from shardwright.planner.contract.plan_figures import DataParallel, ObjectiveName, Phase
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dump.write import dumping
from shardwright.planner.garbage import uncollected
from shardwright.planner.prepare import DEVICE, prepare_shares, read, refuse_other_dtype
from shardwright.planner.search.meshes import Cluster, choose_mesh, other_meshes
from shardwright.planner.search.search_state import SearchState
from shardwright.planner.search.solution import SolverOptions
from shardwright.planner.search.traced_model import TracedModel
from shardwright.planner.search.unequal import search_shares
from shardwright.planner.trace.trace_lock import not_in_model_code


@uncollected()  # until all but the plan is freed
def plan(
    model: Any,
    tp: int | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    args: tuple[Any, ...] | torch.Tensor | None = (),
    kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
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
        kwargs: Example inputs by name. A list of them is for several calls, with a cache and
            without one for example. The plan then holds for all, the first is priced, and each is
            given `args`.
        objective: What is minimised. "time": the predicted time of the phases, plus a price for
            each byte that a rank holds, because free memory is room for more sequences (see
            `planner/problem/optimize.py`). "memory": the fewest bytes, or up to 5 % more where
            that saves time; if `memory` is given, the least time under that limit.
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
            of them, at least a tenth. A model whose trace takes twice as long has no plan.
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
            averaged. "fsdp": they may share out parameters, with gradients and optimizer state,
            and gather them as they go; the plan says which, and `shardwright.fully_shard` does it.
            With `cluster` both are compared, for training.
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
    given = dict(locals())
    check_types(given)
    if objective not in get_args(ObjectiveName):
        raise UsageError(f"objective must be 'time' or 'memory', not {objective!r}")
    return search_plan(**given, began=time.monotonic()).ended.plan


class Search(NamedTuple):
    """A finished search, and the cluster and model that its mesh was chosen for, if it was."""

    ended: SearchState
    cluster: Cluster | None = None
    model: TracedModel | None = None

    def other_meshes(self) -> list[SearchState]:
        """Search the next best meshes that fit; there are none if the mesh was given."""
        if self.cluster is None or self.model is None:
            return []
        return other_meshes(self.model, self.cluster, self.ended)


@not_in_model_code
@uncollected()
def search_plan(
    model: Any,
    tp: int | None,
    *,
    objective: ObjectiveName,
    memory: int | Sequence[int] | None,
    speeds: Sequence[float] | None,
    solver: str | None,
    time_limit: float,
    began: float,
    cluster: Cluster | None,
    dump: str | Path | None,
    write_model: str | Path | None,
    **how: Any,
) -> Search:
    """Read and trace a model, and search its plan.

    The arguments are as for `plan`, and `began` is when planning began, in the time of
    `time.monotonic`. `how` holds those of `prepare_shares`. With a cluster, both kinds of `dp` are
    compared.

    Raises:
        UsageError, ModelError, InfeasibleError, SolverError: as `plan`.
    """
    limit, memories = (memory, ()) if isinstance(memory, int | None) else (None, tuple(memory))
    solver = solvers.current(solver)
    asked = SolverOptions(solver, time_limit, limit, objective, began)
    solvers.load(solver)  # an unknown one is refused before the trace
    how["until"] = began + time_limit
    if cluster is None:
        sharing = prepare_shares(model, tp, speeds=speeds or (), memories=memories, **how)
        task = sharing(None)
        refuse_other_dtype(model, how.get("dtype"), task.source.dtype)
        with dumping(dump, task, write_model) as tell:
            return Search(search_shares(task, sharing, asked, tell))
    batch, _ = how.pop("batch", None), how.pop("dp", None)
    if any(given is not None for given in (tp, how.pop("mesh"), how.pop("gpus_per_host"))):
        raise UsageError("give tp or mesh, or a cluster to choose the mesh for, not both")
    if memories or speeds:
        raise UsageError(
            "speeds, or a memory limit for each rank, cannot be combined with a cluster: give tp "
            "or mesh instead"
        )
    found = read(model, cluster.ranks if batch is None else batch, **how)
    refuse_other_dtype(model, how.get("dtype"), found.source.dtype)
    ended = choose_mesh(found, cluster, asked, lambda task: dumping(dump, task, write_model))
    return Search(ended, cluster, found)
