"""The dry run of a solution: the plan that it makes is run on meta, as several of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from shardwright.errors import ModelError
from shardwright.planner.contract.dims import Dim, atoms, dim_size
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.plan_file import ModulePlan, Plan
from shardwright.planner.dry_run.conflict import Conflict, of_module, of_size
from shardwright.planner.dry_run.local_run import Mismatch
from shardwright.planner.dry_run.local_sizes import Unsolvable, local_sizes
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.module_plans import module_plans
from shardwright.planner.emit.redistributions import InconsistentBoundary
from shardwright.planner.search.plan import finished, make_plan
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
        SolverError: as `Solution.report`: the solver is at its proof meanwhile.
    """
    found = _dry_run(task, solution, earlier)
    if isinstance(found, str):
        raise ModelError(
            f"{task.source.architecture} itself fails on meta, so no plan can be tried: {found}"
        )
    return found


def _dry_run(task: Task, solution: Solution, earlier: Sequence[Conflict]) -> Plan | Conflict | str:
    """The plan, or what it may not have, or what went wrong though nothing was split."""
    layouts = solution.layouts
    with ThreadPoolExecutor(1) as beside:  # CP-SAT does without Python's lock
        proof = beside.submit(lambda: solution.report)
        try:
            modules = local_modules(task, layouts)
        except Unsolvable as failure:
            return of_size(failure, layouts, earlier) or str(failure)
        except InconsistentBoundary as failure:
            return of_module(failure.module, str(failure), layouts, earlier) or str(failure)
        plan = make_plan(task, solution, modules, earlier)
        stage("verify")
        mismatch = tried(task, plan, layouts)
    if mismatch is not None:
        module = task.folding.traced_name(mismatch.module)
        return of_module(module, mismatch.text, layouts, earlier) or mismatch.text
    return finished(task, plan, proof.result())


def local_modules(task: Task, layouts: Layouts) -> dict[str, ModulePlan]:
    """The plan of every traced module that changes, with local values of its attributes.

    Raises:
        Unsolvable: no attributes give some size, and no call can be given it.
        InconsistentBoundary: a module would take a tensor in one call as it is, in another
            as it was.
    """
    several = bool(layouts.states.sub.table())
    every = task.ranks(layouts.states) if several else corners(task, layouts)
    dims = _traced(layouts)
    attributes, sizes = local_sizes(task.graph, dims, _unlike(every, dims), layouts.dim)
    return module_plans(task.source.module, layouts, attributes, sizes)


def _unlike(every: Sequence[Coords], dims: Mapping[str, tuple[Dim, ...]]) -> list[Coords]:
    """Of ranks that hold parts of the same lengths, the first."""
    distinct = {id(d): d for each in dims.values() for d in each}.values()
    split = {atom for d in distinct for atom in atoms(d) if atom.mesh is not None}
    found: dict[tuple[int | None, ...], Coords] = {}
    for at in every:
        found.setdefault(tuple([dim_size(atom, at) for atom in split]), at)
    return [*found.values()]


def corners(task: Task, layouts: Layouts) -> list[Coords]:
    """Where the ranks stand that a plan is tried as: the first and the last."""
    ranks = task.ranks(layouts.states)
    return [ranks[0], ranks[-1]] if task.tp * task.cp > 1 else ranks[:1]


def tried(task: Task, plan: Plan, layouts: Layouts, every_block: bool = False) -> Mismatch | None:
    """Run the model as some of the ranks; None if all is as `layouts` of the traced graph say.

    Of blocks that are alike one runs for all, and of ranks whose tensors have the same sizes,
    unless `every_block` is to.
    """
    traced = _traced(layouts)
    distinct = {id(d): d for dims in traced.values() for d in dims}
    ran: list[dict[str, tuple[int, ...]]] = []
    for at in corners(task, layouts):
        local = {key: dim_size(d, at) or 0 for key, d in distinct.items()}
        sizes = {n: tuple([local[id(d)] for d in dims]) for n, dims in traced.items()}
        if sizes in ran and not every_block:
            continue
        ran.append(sizes)
        for run in task.dry_runs:
            if (mismatch := run.mismatch(plan, at, sizes, every_block)) is not None:
                return mismatch
    return None


def _traced(layouts: Layouts) -> dict[str, tuple[Dim, ...]]:
    return {n: layouts.traced(n) for n in layouts.graph.tensors}
