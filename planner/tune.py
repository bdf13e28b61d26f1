"""Times a plan and others like it on ranks of this machine, and keeps the fastest.

The others place the weights of one kind otherwise, or are for another mesh: those that should be
fastest by their price. Each runs in turn with the plan, so that both meet the same machine.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import InfeasibleError, SolverError, UsageError
from shardwright.planner.contract.plan_figures import Trial, Workload
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ
from shardwright.planner.on_ranks.launch import run_processes
from shardwright.planner.on_ranks.numeric import (
    buildable,
    in_dtype,
    random_inputs,
    random_model,
    run,
)
from shardwright.planner.prepare import as_planned, prepare
from shardwright.planner.problem.pins import as_pins
from shardwright.planner.report.explain import asked_for, explained
from shardwright.planner.search.ladder import search
from shardwright.planner.search.search_state import SearchState
from shardwright.planner.trace.model import python_references
from shardwright.planner.trace.model.argument_trees import tree_map
from shardwright.planner.trace.model.input_values import calls_by_name
from shardwright.runtime.api import apply
from shardwright.runtime.model.build import as_dtype
from shardwright.runtime.model.hub import Hub
from shardwright.runtime.model.identity import check_identity
from shardwright.runtime.slots import state_of

T = TypeVar("T")

MAX_PLANS = 12
"""Plans that are timed, the first included."""

RUNS_OF_EACH = 9
"""Runs of each plan in turn with the first."""

LEADERS, SECONDS_OF_EACH = 4, 15.0
"""How many of the fastest are timed again at least, and for how long: of many that were timed
briefly, some are fast by chance."""

GAIN = 0.98
"""Another plan is kept if it takes at most this share of the time: less may be noise."""


class Given(NamedTuple):
    """What ranks build and run: a model as `numeric.random_model` takes it, and its inputs."""

    model: Any
    inputs: python_references.Inputs
    hub: Hub


def tune(
    plan: Plan | str | Path,
    model: Any,
    trust_remote_code: bool = False,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    **hub: Any,
) -> Plan:
    """Return the fastest on this machine of a plan and others like it, with the measured times.

    Weights are random. Each rank is a process, on a GPU of its own if there are enough, else on the
    CPU, and holds the whole model for a moment.

    Args:
        plan: The plan, or its file.
        model: The model it was made for, as `shardwright.plan` takes it; a module must pickle.
        trust_remote_code: Whether to run code that comes with the model.
        args: Inputs, as given for the plan; without any, random tokens of the workload.
        kwargs: Inputs by name; of several calls the first is timed.
        **hub: `revision`, `cache_dir`, `local_files_only`, `token`, as `plan` takes them.

    Raises:
        PlanError: the plan is for another model.
        UsageError: ranks of the plan, or a phase that it was priced for, cannot be timed.
        DistributedError: a rank died.
    """
    how = {"args": args, "kwargs": kwargs, "trust_remote_code": trust_remote_code, **hub}
    plan = Plan.load(plan)
    task = prepare(model, **as_planned(plan), **how)
    check_identity(task.source.module, plan)
    return tune_search(search(task, asked_for(plan)), model, **how).plan


def tune_search(
    ended: SearchState,
    model: Any,
    meshes: Sequence[SearchState] = (),
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    **hub: Any,
) -> SearchState:
    """Return the search whose plan is fastest; the rest is as for `tune`.

    Args:
        ended: The end of the search for the plan.
        model: The model.
        meshes: The ends of searches on other meshes of as many ranks.
        args: Inputs.
        kwargs: Inputs by name; of several calls the first is timed.
        **hub: Options of the Hub, and `trust_remote_code`.
    """
    plan = ended.plan
    if plan.workload.dp == "fsdp":
        raise UsageError("a plan for fully_shard cannot be timed: plan with dp='ddp'")
    others = [*islice(other_searches(ended, meshes), MAX_PLANS - 1)]
    if not others:
        return ended
    of_hub = Hub(**hub)
    given = Given(buildable(model, of_hub), (args, calls_by_name(kwargs)[0]), of_hub)
    on_gpus = torch.cuda.device_count() >= plan.world_size
    plans = [other.plan for other in others]
    work = plan, plans, given, on_gpus
    found = run_processes(plan.world_size, _timed, *work, on_gpus=on_gpus)[0]
    trials = [
        Trial(
            mesh=one.mesh, pins=one.pins, predicted_ns=one.predicted.time_ns,
            time_ns=then, beside_ns=now,
        )
        for one, (now, then) in zip(plans, found, strict=True)
    ]  # fmt: skip
    order = sorted(range(len(others)), key=lambda i: trials[i].share)
    chosen = others[order[0]] if trials[order[0]].share <= GAIN else ended
    kept = chosen.plan.model_copy(update={"trials": [trials[i] for i in order]})
    return replace(chosen, outcome=kept.sealed(), error_without_sp=None, error_on_device=None)


def other_searches(ended: SearchState, meshes: Sequence[SearchState]) -> Iterator[SearchState]:
    """Yield searches for plans unlike that of `ended`: those of meshes, then by predicted time."""
    plan = ended.plan
    names = [name for name, shape in plan.model.parameters.items() if len(shape) > 1]
    found = [
        (other.time_ns, {**plan.pins, of.name: other.placement})
        for of in explained(plan, ended, names)
        for other in of.alternatives
        if other.priced
    ]
    ways = (pins for _, pins in sorted(found, key=lambda each: each[0]))
    known = [plan]
    for now in chain(meshes, (_pinned(ended, pins) for pins in ways)):
        if now is None:
            continue
        if not any((now.plan.mesh, now.plan.modules) == (p.mesh, p.modules) for p in known):
            known.append(now.plan)
            yield now


def _pinned(ended: SearchState, pins: Mapping[str, str]) -> SearchState | None:
    """Return the search with these pins; None if it finds no plan."""
    try:
        now = search(replace(ended.task, pins=as_pins(pins)), ended.asked)
    except SolverError:
        return None
    return None if isinstance(now.outcome, InfeasibleError) else now


def _timed(
    plan: Plan, others: Sequence[Plan], given: Given, on_gpus: bool
) -> list[tuple[int, int]]:
    """Return, for each other plan, the nanoseconds of the plan's workload and of its own."""
    dtype = as_dtype(plan.workload.dtype) or torch.float32
    whole = random_model(given.model, dtype, given.hub)
    device = torch.device("cuda", dist.get_rank()) if on_gpus else None
    first = _split(whole, plan, device, given.inputs)

    def beside(other: Plan, seconds: float = 0) -> tuple[int, int]:
        second, times = _split(whole, other, device, given.inputs), [0, 0]
        for phase, often in plan.workload.phases.items():
            runs = _once(phase, *first), _once(phase, *second)
            pair = _in_turn(*runs, seconds / len(plan.workload.phases))
            times = [spent + often * once for spent, once in zip(times, pair, strict=True)]
        return times[0], times[1]

    def share(i: int) -> float:
        return out[i][1] / out[i][0]

    out = [beside(other) for other in others]
    briefly, leaders = {*range(len(others))}, list[int]()
    while briefly:
        i = _same_on_all(min(briefly, key=share))
        if len(leaders) >= LEADERS and _same_on_all(share(i) > min(map(share, leaders))):
            break
        out[i] = beside(others[i], SECONDS_OF_EACH)
        briefly.remove(i)
        leaders.append(i)
    return out


def _same_on_all(found: T) -> T:
    """Return what rank 0 found: ranks measure a little differently."""
    of_first = [found]
    dist.broadcast_object_list(of_first)
    return of_first[0]


Split = tuple[nn.Module, python_references.Inputs]
"""A split model and its inputs."""


def _split(
    whole: nn.Module, plan: Plan, device: torch.device | None, given: python_references.Inputs
) -> Split:
    model = copy.deepcopy(whole).to(device)
    inputs = _inputs(model, plan.workload, given)
    return apply(model, plan, timeout=1800), inputs


def _once(phase: str, model: nn.Module, inputs: python_references.Inputs) -> Callable[[], Any]:
    """Return what runs a phase once. Decode steps begin with a new cache."""
    if phase == "decode":
        return _decoding(model, inputs)
    if phase == "train":
        return lambda: run(model, *inputs[0], **inputs[1])
    return lambda: _without_gradient(model, inputs)


def _without_gradient(model: nn.Module, inputs: python_references.Inputs) -> Any:
    with torch.inference_mode():
        return model(*inputs[0], **inputs[1])


def _inputs(
    model: nn.Module, load: Workload, given: python_references.Inputs
) -> python_references.Inputs:
    """Return the given inputs, or random tokens for a copy of the model in the workload."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    sizes = {TRACE_BATCH: -(-load.batch // load.replicas), TRACE_SEQ: load.seq}
    inputs = in_dtype(given, weight.dtype) if any(given) else ((), random_inputs(model, sizes))
    return tree_map(lambda v: v.to(weight.device) if isinstance(v, Tensor) else v, inputs)


def _decoding(model: nn.Module, inputs: python_references.Inputs) -> Callable[[], Any]:
    """Return what makes one decode step behind the inputs.

    Raises:
        UsageError: the model gives no cache, or has an encoder.
    """
    args, named = inputs
    ids = named.get("input_ids")
    if args or ids is None or "decoder_input_ids" in named:
        raise UsageError(f"a decode step of {type(model).__name__} cannot be timed: price prefill")
    with torch.inference_mode():
        cache = state_of(model(**{**named, "use_cache": True}), model)
    if not cache:
        raise UsageError(f"{type(model).__name__} gives no cache: price prefill")
    again = {"input_ids": ids[:, :1], **cache, "use_cache": True}
    return lambda: _without_gradient(model, ((), again))


def _in_turn(
    first: Callable[[], Any], second: Callable[[], Any], seconds: float
) -> tuple[int, int]:
    """Return the nanoseconds of two runs, made in turn on all ranks for some time.

    The second is the first times the median of how many times as long it takes. Machines change
    their pace within seconds, and waiting ranks wake at ticks of the clock: medians of either run
    alone differ by up to 7 % between equal plans, these by up to 2 %.
    """
    pairs: list[tuple[int, int]] = []

    def once(run: Callable[[], Any]) -> int:
        dist.barrier()
        begun = time.perf_counter_ns()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter_ns() - begun

    def repeat(often: int) -> None:
        pairs.extend((once(first), once(second)) for _ in range(often))

    repeat(1 + RUNS_OF_EACH)
    del pairs[0]  # it made what later runs reuse
    spent = sum(map(sum, pairs)) / RUNS_OF_EACH / 1e9
    repeat(_same_on_all(int(seconds / spent)))
    time_ns = median(now for now, _ in pairs)
    return int(time_ns), int(time_ns * median(then / now for now, then in pairs))
