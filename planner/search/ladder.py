"""The steps of the search, from the cheapest plan to the first that passes its dry run.

`LADDER` is the policy. Its steps run in order. A step is a function of the state of the search, and
returns None if it does not apply. If a step clears the outcome, the ladder starts from the top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.garbage import uncollected
from shardwright.planner.problem.conventions import PROJECTIONS, TABLES, projections
from shardwright.planner.problem.gathered import unsplittable
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.problem.optimize import SLACK, OutOfTime
from shardwright.planner.search.recomputed_blocks import recompute_all, with_fewer
from shardwright.planner.search.restrictions import Restrictions, formulate
from shardwright.planner.search.search_state import SearchState, start
from shardwright.planner.search.solution import (
    Solution,
    SolverOptions,
    possible,
    solve,
    states_left,
)
from shardwright.planner.search.task import Task
from shardwright.planner.search.try_plan import dry_run
from shardwright.planner.trace.trace_lock import not_in_model_code

ATTEMPTS = 40
"""How many plans may fail their dry run before the search gives up."""


def attempt(now: SearchState, restrictions: Restrictions) -> SearchState:
    """Solve the problem under the given restrictions; return the state with the outcome."""
    formulation = None
    try:
        formulation = formulate(now.task, restrictions, now.formulation)
        outcome = solve(now.task, formulation, now.asked)
    except InfeasibleError as error:
        outcome = error.with_traceback(None)  # a traceback would keep this attempt's memory alive
    return replace(now, restrictions=restrictions, formulation=formulation, outcome=outcome)


def improve(now: SearchState, restrictions: Restrictions, what: str) -> SearchState:
    """Do the same as `attempt`; if time runs out, keep the solution at hand.

    Args:
        now: The state; its outcome may be a solution.
        restrictions: Those of the new attempt.
        what: What the attempt may do to the solution, for the plan's note.

    Raises:
        OutOfTime: there is no solution at hand.
    """
    try:
        return attempt(now, restrictions)
    except OutOfTime:
        if not isinstance(now.outcome, Solution):
            raise
        return replace(now, no_time_to=(*now.no_time_to, what))


def solve_first(now: SearchState) -> SearchState | None:
    """Solve the problem if there is no outcome yet."""
    return attempt(now, now.restrictions) if now.outcome is None else None


def recompute_fewer(now: SearchState) -> SearchState | None:
    """If not all blocks need to be computed again, do so with as few as fit, if that is faster.

    At first it is as few as fit with the placements that were found, or with those that take least
    memory if no block is computed again; then one more at a time. The placements with which fewer
    blocks fit may take longer than those blocks save.
    """
    kept = now.without_recompute
    if kept is None or not isinstance(now.outcome, Solution):
        return None
    unlimited = _for_memory(replace(kept, asked=replace(kept.asked, memory=None)))
    every, fewer = now.outcome, now
    try:
        smallest = attempt(unlimited, kept.restrictions).outcome
        found = [each for each in (every, smallest) if isinstance(each, Solution)]
        for task in with_fewer(kept, found):
            fewer = climb(now.restart(task), FITTING)
            if not isinstance(fewer.outcome, OverMemory):
                break
    except OutOfTime:
        now = fewer = replace(now, no_time_to=(*now.no_time_to, "compute fewer blocks again"))
    found = fewer.outcome
    faster = isinstance(found, Solution) and found.time_ns < every.time_ns
    return replace(fewer if faster else now, without_recompute=None)


def least_memory(now: SearchState) -> SearchState | None:
    """If no plan fits the device, solve for least memory."""
    error = now.outcome
    if not isinstance(error, OverMemory) or not now.asked.may_be_over:
        return None
    return attempt(replace(_for_memory(now), error_on_device=error), now.restrictions)


def _for_memory(now: SearchState) -> SearchState:
    """Return the state before a search for least memory."""
    again = start(now.task, replace(now.asked, objective="memory"), now.restrictions)
    return replace(again, formulation=now.formulation, conflicts=now.conflicts)


def free_tables(now: SearchState) -> SearchState | None:
    """If the problem is infeasible with token tables sharded by rows, drop that convention."""
    if not isinstance(now.outcome, InfeasibleError) or now.formulation is None:
        return None
    if TABLES not in now.formulation.followed:
        return None
    others = now.restrictions.conventions - {TABLES}
    return attempt(now, replace(now.restrictions, conventions=others))


def gather(now: SearchState) -> SearchState | None:
    """Allow weights that no op can use sharded to be stored sharded and all-gathered at each use.

    This applies if the plan is over memory, or if the objective is least memory and these weights
    hold more than the slack of bytes.
    """
    found, restrictions = now.outcome, now.restrictions
    if not isinstance(found, (Solution, OverMemory)):
        return None
    if isinstance(found, Solution) and now.asked.objective == "time":
        return None
    if isinstance(found, Solution) and not restrictions.pins:
        states, can = found.layouts.states, found.possible
    else:
        assert now.formulation is not None, "an outcome without a problem"
        unpinned = now.formulation.unpinned
        floor = unpinned.costs.least_bytes
        if isinstance(found, OverMemory) and floor + found.passing > found.budget:
            return None  # not even if all were gathered
        states, can = (
            unpinned.costs.states,
            possible(states_left(unpinned.network, unpinned.small)) if unpinned.small else {},
        )
    least = SLACK if isinstance(found, Solution) else 0
    more = unsplittable(now.task.graph, states, can, least) - restrictions.gathered
    if not more:
        return None
    gathered = restrictions.gathered | more
    conventions = now.asked.conventions
    wanted = replace(restrictions, gathered=gathered, conventions=conventions)
    return improve(now, wanted, "shard weights that are all-gathered at each use")


def split_attention(now: SearchState) -> SearchState | None:
    """If the slack of bytes was spent on replicated attention, solve with its weights sharded.

    This does not apply if there is a limit on the memory of a rank.
    """
    found = now.outcome
    if not isinstance(found, Solution) or found.objective.memory_bytes is not None:
        return None
    preferred, placed = projections(now.task.graph, found.layouts.states), found.layouts.assignment
    if all(placed[n] in preferred[n] for n in preferred.keys() - found.pinned.keys()):
        return None
    wanted = replace(now.restrictions, conventions=frozenset({TABLES, PROJECTIONS}))
    return replace(improve(now, wanted, "shard attention"), before=now)


def leave_attention(now: SearchState) -> SearchState | None:
    """If `split_attention` made the problem infeasible, go back to the solution before it."""
    return now.before if isinstance(now.outcome, InfeasibleError) else None


def need_not_split_sequence(now: SearchState) -> SearchState | None:
    """If the problem is infeasible with hidden states sharded over cp, drop that requirement."""
    sequence, error = now.task.sequence, now.outcome
    if now.task.cp == 1 or not isinstance(error, InfeasibleError) or isinstance(error, OverMemory):
        return None
    if sequence is None or not sequence.handed:
        return None
    task = replace(now.task, sequence=sequence.loose())
    again = now.restart(task)
    return attempt(again, again.restrictions)


def try_out(now: SearchState) -> SearchState | None:
    """Run the solution's plan on meta."""
    if not isinstance(now.outcome, Solution):
        return None
    return replace(now, outcome=dry_run(now.task, now.outcome, now.conflicts))


def forbid(now: SearchState) -> SearchState | None:
    """If the dry run failed, forbid the splits of its conflict and start over.

    Raises:
        SolverError: `ATTEMPTS` plans failed their dry run, or the time is up.
    """
    conflict = now.outcome
    if not isinstance(conflict, Conflict):
        return None
    now = replace(now, conflicts=(*now.conflicts, conflict))
    if len(now.conflicts) == ATTEMPTS:
        raise SolverError("no plan passed its dry run on meta: please report this model")
    if now.asked.left < 0:
        raise SolverError(
            f"no plan within the time limit of {now.asked.seconds:g} seconds: {len(now.conflicts)} "
            f"failed on meta, the last because {conflict.text}; raise --time-limit"
        )
    failed = {(now.task.graph.representative(name), shards) for name, shards in conflict.splits}
    restrictions = replace(now.restrictions, forbidden=now.restrictions.forbidden | failed)
    again = replace(now.restart(restrictions=restrictions), formulation=now.formulation)
    if PROJECTIONS not in restrictions.conventions:
        return again
    return replace(again, restrictions=restrictions, before=again)  # attention was replicated


def split_along_sequence(now: SearchState) -> SearchState | None:
    """If nothing fits and the user left it open, start over with sequence parallelism."""
    if not isinstance(now.outcome, OverMemory) or now.task.along_sequence is None:
        return None
    try:
        task = now.task.along_sequence()
    except InfeasibleError:  # the model has no sequence to shard
        return None
    return replace(start(task, now.asked), error_without_sp=now.outcome)


class Step(NamedTuple):
    """A step of the search: a description, and the function, which may return None."""

    what: str
    take: Callable[[SearchState], SearchState | None]


FREE_TABLES = Step("infeasible: token embeddings sharded as is cheapest", free_tables)
"""Runs after each other step, because any may make the problem infeasible with this convention."""

SOLVING = (
    Step("solve; for least memory, with token embeddings sharded by rows", solve_first),
    Step("does not fit, in training: compute blocks again in the backward pass", recompute_all),
    Step("does not fit the device: minimize memory instead", least_memory),
    Step("infeasible: hidden states need not be sharded over cp", need_not_split_sequence),
    Step(
        "does not fit, or many weights can only be used unsharded: all-gather them at each use",
        gather,
    ),
    Step("attention is replicated without need: shard it", split_attention),
    Step("infeasible: go back to attention as it was", leave_attention),
)
"""The steps to a solution, which is checked but not yet dry-run."""

FITTING = tuple(step for step in SOLVING if step.take is not least_memory)
"""The steps to a solution that fits."""

SETTLING = (
    *SOLVING,
    Step("not all blocks need to be computed again: as few as fit", recompute_fewer),
    Step(
        "does not fit: start over with hidden states sharded along the sequence",
        split_along_sequence,
    ),
)
"""The steps to the solution whose plan is run on meta."""

LADDER = (
    *SETTLING,
    Step("run the plan on meta", try_out),
    Step("the dry run failed: forbid these splits and start over", forbid),
)
"""The steps to a plan."""

Tell = Callable[[str, SearchState], None]
"""Called after each step that applied, with its description and the new state."""


def climb(
    now: SearchState, ladder: Sequence[Step] = LADDER, tell: Tell | None = None
) -> SearchState:
    """Run the steps of a ladder, again and again until there is an outcome; return the state.

    Raises:
        ModelError: the model itself cannot run on meta.
        UsageError: a pin is invalid.
        SolverError: the solver found nothing in time, or its answer does not hold.
    """
    while True:
        for what, take in (each for step in ladder for each in (step, FREE_TABLES)):
            then = take(now)
            if then is not None:
                now = then
                if tell is not None:
                    tell(what, now)
        if now.outcome is not None:
            return now


@not_in_model_code
@uncollected()
def search(task: Task, asked: SolverOptions | None = None, tell: Tell | None = None) -> SearchState:
    """Search, and return the last state; its `plan` is the cheapest that passes its dry run.

    Raises:
        InfeasibleError: `plan` raises it. No plan fits the memory (if sequence parallelism was
            tried too, the message has the least of both), the pins cannot hold, or hidden states
            cannot be sharded along the sequence.
        ModelError, UsageError, SolverError: as `climb`.
    """
    return climb(start(task, asked), LADDER, tell)
