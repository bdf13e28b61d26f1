"""The dry run of a solution: its plan is run on meta as the first and the last rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from shardwright.errors import ModelError
from shardwright.planner.contract.dims import Dim, atoms, dim_size
from shardwright.planner.contract.mesh import EP, Coords
from shardwright.planner.contract.plan_file import ModulePlan, Plan
from shardwright.planner.dry_run.conflict import Conflict, of_module, of_size
from shardwright.planner.dry_run.local_run import Mismatch
from shardwright.planner.dry_run.local_sizes import Unsolvable, local_sizes, sizes_of_layers, unmet
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.module_plans import module_plans
from shardwright.planner.emit.redistributions import InconsistentBoundary
from shardwright.planner.graph.graph import SizeArgument
from shardwright.planner.search.emitted_plan import finished, make_plan
from shardwright.planner.search.solution import Solution
from shardwright.planner.search.task import Task
from shardwright.planner.stages import stage


def dry_run(task: Task, solution: Solution, earlier: Sequence[Conflict] = ()) -> Plan | Conflict:
    """Return the plan of a solution if its dry run passes, else the conflict that made it fail.

    Args:
        task: The task.
        solution: The solution to try.
        earlier: Conflicts of the dry runs of earlier solutions, in order.

    Raises:
        ModelError: nothing was sharded where it failed: the model itself cannot run on meta.
        SolverError: as `Solution.checked`, and as `Solution.report`, because the solver proves the
            solution meanwhile.
    """
    stage("check")
    found = _dry_run(task, solution.checked, earlier)
    if isinstance(found, str):
        name = task.source.architecture
        if "if unsharded" in found:
            raise ModelError(
                f"cannot split {name}: {found}, where nothing is sharded: it may decide by what a "
                "split model has otherwise, such as the class of a module (use isinstance)"
            )
        raise ModelError(f"{name} itself fails on meta, so no plan can be tried: {found}")
    return found


def _dry_run(task: Task, solution: Solution, earlier: Sequence[Conflict]) -> Plan | Conflict | str:
    """Return the plan, or the conflict, or the error's text if nothing was sharded."""
    stage("emit")
    layouts = solution.layouts
    with ThreadPoolExecutor(1) as beside:  # CP-SAT releases the GIL
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
    """Return the plan of every traced module that changes, with local values of its attributes.

    Raises:
        Unsolvable: no attribute values give some local size, and no call can be given it.
        InconsistentBoundary: a module would redistribute a tensor from different sources in
            different calls.
    """
    several = bool(layouts.states.sub.table())
    every = _without_ep(task.ranks(layouts.states)) if several else corners(task, layouts)
    dims = layouts.traced_dims
    root, ranks = task.source.module, _unlike(every, dims)
    attributes, sizes = local_sizes(task.graph, dims, ranks, layouts.dim, sizes_of_layers(root))
    return module_plans(root, layouts, attributes, sizes)


def unmet_sizes(task: Task, layouts: Layouts) -> list[tuple[SizeArgument, int, int]]:
    """Return the sizes that the unchanged code gives wrongly, with what it gives and what is right.

    These are the sizes that a runtime must change before the code can run on local tensors.
    """
    return unmet(task.graph, layouts.traced_dims, corners(task, layouts))


def _unlike(every: Sequence[Coords], dims: Mapping[str, tuple[Dim, ...]]) -> list[Coords]:
    """Return one rank, the first, for each distinct set of local lengths."""
    distinct = {id(d): d for each in dims.values() for d in each}.values()
    split = {atom for d in distinct for atom in atoms(d) if atom.mesh is not None}
    found: dict[tuple[int | None, ...], Coords] = {}
    for at in every:
        found.setdefault(tuple([dim_size(atom, at) for atom in split]), at)
    return [*found.values()]


def corners(task: Task, layouts: Layouts) -> list[Coords]:
    """Return the coordinates of the ranks of a dry run: first and last; all if parts differ."""
    ranks = _without_ep(task.ranks(layouts.states))
    if task.sub.weights:
        return ranks[: task.tp]
    return [ranks[0], ranks[-1]] if task.tp * task.cp > 1 else ranks[:1]


def _without_ep(ranks: Sequence[Coords]) -> list[Coords]:
    """Return the coordinates as if each rank had all experts: `planner/experts/` tests the rest."""
    return [{**at, EP: (0, 1)} if EP in at else at for at in ranks]


def tried(task: Task, plan: Plan, layouts: Layouts, every_block: bool = False) -> Mismatch | None:
    """Run the model on meta as some of the ranks, and compare shapes with `layouts`.

    Identical blocks run once, and ranks with the same local sizes run once, unless `every_block`.

    Args:
        task: The task.
        plan: The plan to try.
        layouts: Layouts of the traced graph.
        every_block: Whether to run every block.

    Returns:
        The first mismatch, or None.
    """
    traced = layouts.traced_dims
    distinct = {id(d): d for dims in traced.values() for d in dims}
    ran: list[dict[str, tuple[int, ...]]] = []
    for at in corners(task, layouts):
        local = {key: dim_size(d, at) or 0 for key, d in distinct.items()}
        sizes = {n: tuple([local[id(d)] for d in dims]) for n, dims in traced.items()}
        if sizes in ran and not every_block:
            continue
        ran.append(sizes)
        for run in task.dry.each:
            if (mismatch := run.mismatch(plan, at, sizes, every_block)) is not None:
                return mismatch
    return None
