"""Chooses the mesh for some hosts and GPUs: the fastest that fits, of all that were solved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

from shardwright.errors import InfeasibleError, ModelError, SolverError, UsageError
from shardwright.planner.contract.mesh import CP, EP, MAX_RANKS, TP
from shardwright.planner.contract.plan_figures import (
    DataParallel,
    MeshChoice,
    ObjectiveName,
    Workload,
)
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.devices.device import ranks_on_a_host
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.search.ladder import FITTING, SETTLING, Tell, climb, search
from shardwright.planner.search.recomputed_blocks import least_time
from shardwright.planner.search.search_state import SearchState, start
from shardwright.planner.search.solution import Solution, SolverOptions
from shardwright.planner.search.task import Task
from shardwright.planner.search.traced_model import TracedModel
from shardwright.planner.units import human_bytes

ALL_RECOMPUTED = "all blocks computed again"
"""Why a mesh takes longer than it may have to, if fewer would do."""

ROWS = 2
"""Least tokens of a rank of cp."""

NEXT = 3
"""Meshes besides the best that are worth timing."""


@dataclass(frozen=True)
class Cluster:
    """Hosts with GPUs, one rank on each GPU."""

    hosts: int
    gpus_per_host: int

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            UsageError: one is below 1, or there are too many GPUs.
        """
        if not all(type(n) is int for n in (self.hosts, self.gpus_per_host)):
            raise UsageError(
                f"hosts and GPUs must be ints, not {self.hosts!r:.40}, {self.gpus_per_host!r:.40}"
            )
        if min(self.hosts, self.gpus_per_host) < 1 or self.ranks > MAX_RANKS:
            raise UsageError(
                f"{self.hosts} hosts with {self.gpus_per_host} GPUs: from 1 to {MAX_RANKS:,} GPUs"
            )

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.hosts * self.gpus_per_host


def meshes(
    cluster: Cluster, workload: Workload, spreads: Callable[[], bool]
) -> Iterator[tuple[dict[str, int], DataParallel]]:
    """Yield each mesh of a cluster, and what its copies of the model do.

    If `spreads`, there are also meshes whose copies share out the experts of mixtures: all copies,
    or those of each host. Where there would be more copies than the batch has sequences, several
    ranks share each sequence over `cp`; decoded tokens cannot be shared.
    """
    ranks, trains = cluster.ranks, "train" in workload.phases
    yield {TP: ranks}, "ddp"
    for tp in (n for n in range(ranks - 1, 0, -1) if ranks % n == 0):
        copies = ranks // tp
        dp = max(n for n in range(1, min(copies, workload.batch) + 1) if copies % n == 0)
        cp = copies // dp
        if cp > 1 and ("decode" in workload.phases or workload.seq < ROWS * cp):
            continue
        mesh = {name: n for name, n in {"dp": dp, CP: cp}.items() if n > 1} | {TP: tp}
        yield mesh, "ddp"
        if trains and dp > 1:
            yield mesh, "fsdp"
        if cp == 1 and spreads():
            yield {EP: copies, TP: tp}, "ddp"
            within = gcd(cluster.gpus_per_host // tp, copies)
            if 1 < within < copies:
                yield {"dp": copies // within, EP: within, TP: tp}, "ddp"


def choose_mesh(
    model: TracedModel,
    cluster: Cluster,
    asked: SolverOptions,
    dumping: Callable[[Task], AbstractContextManager[Tell | None]],
) -> SearchState:
    """Search the mesh on which the workload takes least time of those that fit.

    If none fits, or for least memory, it is the one on which a rank holds least. All meshes are
    solved, but not for least memory where nothing fits: then the fewest bytes that are known to be
    needed count. Where training does not fit, all blocks are computed again at first. Those that
    may be best are solved with as few as fit, until one is as good as what is left may be. Its plan
    is run on meta. If that fails, another may be best.

    Args:
        model: The model and its workload; the batch is that of all copies together.
        cluster: The hosts.
        asked: How to search.
        dumping: Yields the callback for the steps of the search of a task.

    Returns:
        The state of the search. Its plan has all meshes, best first.

    Raises:
        InfeasibleError: no mesh has a plan.
        UsageError: the device profile has no links between hosts.
        SolverError: no plan was found within the time limit on any mesh.
        ModelError: as `ladder.climb`.
    """
    order, refused = partial(_order, objective=asked.objective), list[MeshChoice]()
    found = _solved(model, cluster, asked, refused)
    solved = sorted(found, key=lambda one: order(one.at_best))
    may, failed = [*solved], InfeasibleError("no mesh has a plan: please report it")
    while may:
        best = min(may, key=lambda one: order(one.at_best))
        if isinstance(best.now.outcome, Plan):
            break
        if not best.settled:
            best.now, best.settled = climb(best.now, SETTLING), True
        else:
            with dumping(best.task) as tell:  # what is told begins with the first step
                best.now = search(best.task, asked, tell) if tell else climb(best.now)
        best.choice = best.at_best = _choice(best.now)
        if isinstance(best.now.outcome, InfeasibleError):
            failed = best.now.outcome if len(may) == len(solved) else failed
            may.remove(best)
    else:
        raise failed
    left = [one.choice for one in solved if one is not best]
    others = sorted([*left, *refused], key=order)
    plan = best.now.plan.model_copy(update={"meshes": [best.choice, *others]})
    return replace(best.now, outcome=plan.sealed(), error_without_sp=None, error_on_device=None)


@dataclass(eq=False)
class _Solved:
    """A mesh that was solved.

    Attributes:
        task: The task on it.
        choice: What was found.
        at_best: What its plan may be at best.
        now: The search: at first without a dry run.
        settled: Whether it has the solution whose plan is run on meta first.
    """

    task: Task
    choice: MeshChoice
    at_best: MeshChoice
    now: SearchState
    settled: bool = False


def _solved(
    model: TracedModel, cluster: Cluster, asked: SolverOptions, refused: list[MeshChoice]
) -> Iterator[_Solved]:
    """Solve all meshes, without dry runs; `refused` gets those that the model does not run on."""
    per_host = ranks_on_a_host(model.workload.device, cluster.ranks, cluster.gpus_per_host)
    for mesh, dp in meshes(cluster, model.workload, lambda: model.spreads):
        try:
            task = model.on(mesh, dp, per_host)
        except (InfeasibleError, ModelError) as error:
            if CP not in mesh:
                raise
            refused.append(MeshChoice(mesh=dict(mesh), dp=dp, why=str(error)))
            continue
        first = start(task, asked)
        try:
            now = climb(first, FITTING)
            again = first if now.restrictions.gathered else now  # tried after least memory
            choice, time_ns = _choice(now), least_time(now)  # if fewer blocks are computed again
            at_best = choice if time_ns is None else choice.model_copy(update={"time_ns": time_ns})
            yield _Solved(task, choice, at_best, again)
        except SolverError as error:  # another mesh may be easier
            choice = MeshChoice(mesh=dict(mesh), dp=dp, why=str(error))
            yield _Solved(task, choice, choice, first)


def other_meshes(model: TracedModel, cluster: Cluster, ended: SearchState) -> list[SearchState]:
    """Return the searches on the next best meshes that fit, of those that were compared.

    Args:
        model: The model.
        cluster: The hosts.
        ended: The end of `choose_mesh`.
    """
    per_host = ranks_on_a_host(model.workload.device, cluster.ranks, cluster.gpus_per_host)
    fit = [choice for choice in ended.plan.meshes[1:] if choice.fits and choice.dp == "ddp"]
    tasks = (model.on(choice.mesh, choice.dp, per_host) for choice in fit[:NEXT])
    found = [search(task, ended.asked) for task in tasks]
    return [now for now in found if not isinstance(now.outcome, InfeasibleError)]


def _choice(now: SearchState) -> MeshChoice:
    """Return what a search found on the mesh of its task."""
    found, task = now.outcome, now.task
    of = MeshChoice(mesh=dict(task.mesh), dp=task.workload.dp)
    if isinstance(found, OverMemory):
        why = f"does not fit {human_bytes(found.budget)} a rank"
        return of.model_copy(update={"memory": found.least, "why": why})
    if isinstance(found, InfeasibleError):
        return of.model_copy(update={"why": str(found)})
    assert isinstance(found, (Solution, Plan)), "a search without an outcome"
    over = now.error_on_device
    why = f"does not fit {human_bytes(over.budget)} a rank" if over else ""
    why = ALL_RECOMPUTED if now.without_recompute is not None and not over else why
    return of.model_copy(update=_figures(found) | {"fits": over is None, "why": why})


def _figures(found: Solution | Plan) -> dict[str, Any]:
    """Return the figures of a mesh with a solution or a plan."""
    if isinstance(found, Plan):
        cost, held = found.predicted, found.predicted.memory
        assert held is not None, "new predictions have it"
        return {"memory": held.total, "time_ns": cost.time_ns, "phase_ns": cost.phase_ns}
    run, held = found.unfolded.bill.first_run, found.unfolded.memory
    return {"memory": held.total, "time_ns": run.price.time, "phase_ns": run.times}


def _order(choice: MeshChoice, objective: ObjectiveName) -> tuple[bool, float]:
    """Return a key that is lowest for the best mesh."""
    figure = choice.time_ns if choice.fits and objective == "time" else choice.memory
    return not choice.fits, math.inf if figure is None else figure
