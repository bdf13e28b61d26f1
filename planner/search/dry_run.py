"""The dry run of a solution: the plan that it makes is run on meta, as several of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.errors import ModelError
from shardwright.planner.contract.dims import Dim, dim_size
from shardwright.planner.contract.mesh import TP, Coords
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.attributes import Unsolvable, local_attributes
from shardwright.planner.dry_run.conflict import Conflict, of_module, of_size
from shardwright.planner.dry_run.local_run import Mismatch
from shardwright.planner.emit.module_plans import module_plans
from shardwright.planner.emit.redistributions import Differs
from shardwright.planner.search.plan import make_plan
from shardwright.planner.search.solution import Solution
from shardwright.planner.search.task import Task
from shardwright.planner.stages import stage


def dry_run(task: Task, solution: Solution, earlier: Sequence[Conflict] = ()) -> Plan | Conflict:
    """The plan, or the splits that it may not have.

    Args:
        task: What is planned.
        solution: How.
        earlier: What dry runs of other solutions failed at, in order.

    Raises:
        ModelError: nothing was split where it failed: the model itself cannot run on meta.
    """
    found = _dry_run(task, solution, earlier)
    if isinstance(found, str):
        raise ModelError(
            f"{task.source.architecture} itself fails on meta, so no plan can be tried: {found}"
        )
    return found


def _dry_run(task: Task, solution: Solution, earlier: Sequence[Conflict]) -> Plan | Conflict | str:
    """The plan, or what it may not have, or what went wrong though nothing was split."""
    layouts, ranks = solution.layouts, task.ranks(solution.unfolded.states)
    corners = [ranks[0], ranks[-1]] if task.tp > 1 else ranks[:1]
    every = {at[TP]: at for at in ranks}.values() if layouts.states.sub.table() else corners
    try:
        traced = {n: layouts.traced(n) for n in task.graph.tensors}
        attributes = local_attributes(task.graph, traced, list(every))
    except Unsolvable as failure:
        return of_size(failure, layouts, earlier) or str(failure)
    try:
        modules = module_plans(task.source.module, layouts, attributes)
    except Differs as failure:
        return of_module(failure.module, str(failure), layouts, earlier) or str(failure)
    plan = make_plan(task, solution, modules, earlier)
    stage("verify")
    for coords in corners:
        if (mismatch := _mismatch(task, plan, traced, coords)) is not None:
            module = task.folding.traced_name(mismatch.module)
            return of_module(module, mismatch.text, layouts, earlier) or mismatch.text
    return plan


def _mismatch(
    task: Task, plan: Plan, traced: Mapping[str, tuple[Dim, ...]], coords: Coords
) -> Mismatch | None:
    """Run the model as one rank; None if all is as `traced`, the layouts, says."""
    sizes = {n: tuple(dim_size(d, coords) or 0 for d in dims) for n, dims in traced.items()}
    found = (run.mismatch(plan, coords, sizes) for run in task.dry_runs)
    return next((m for m in found if m is not None), None)
