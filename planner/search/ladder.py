"""What is tried after what, from the cheapest plan of all to the first that passes its dry run.

`LADDER` is the whole policy. Its steps are taken in order; one that does not apply to what came of
those before it changes nothing. Where a step takes the outcome away, all starts over from the top.
A step is a function of the state of the search, and gives None where it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.garbage import uncollected
from shardwright.planner.problem.conventions import PROJECTIONS, TABLES, projections
from shardwright.planner.problem.gathered import unsplittable
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.problem.optimize import SLACK
from shardwright.planner.search.dry_run import dry_run
from shardwright.planner.search.restrictions import Restrictions, formulate
from shardwright.planner.search.search_state import SearchState, start
from shardwright.planner.search.solution import Solution, SolverOptions, possible, solve
from shardwright.planner.search.task import Task
from shardwright.planner.trace.trace_lock import apart

ATTEMPTS = 40
"""How many plans may fail their dry run before the search gives up."""


def attempt(now: SearchState, restrictions: Restrictions) -> SearchState:
    """Solve the problem under other restrictions."""
    formulation = None
    try:
        formulation = formulate(now.task, restrictions, now.formulation)
        outcome = solve(now.task, formulation, now.asked)
    except InfeasibleError as error:
        outcome = error.with_traceback(None)  # which would keep all of this attempt
    return replace(now, restrictions=restrictions, formulation=formulation, outcome=outcome)


def solve_first(now: SearchState) -> SearchState | None:
    """Solve the problem as it stands."""
    return attempt(now, now.restrictions) if now.outcome is None else None


def least_memory(now: SearchState) -> SearchState | None:
    """Where nothing fits the device: for least memory."""
    asked, error = now.asked, now.outcome
    if not isinstance(error, OverMemory) or not asked.may_be_over:
        return None
    asked = replace(asked, objective="memory")
    again = start(now.task, asked, now.restrictions)
    again = replace(again, formulation=now.formulation, conflicts=now.conflicts, beyond=error)
    return attempt(again, again.restrictions)


def free_tables(now: SearchState) -> SearchState | None:
    """Where nothing holds with tables of tokens split by rows: without that."""
    if not isinstance(now.outcome, InfeasibleError) or now.formulation is None:
        return None
    if TABLES not in now.formulation.followed:
        return None
    others = now.restrictions.conventions - {TABLES}
    return attempt(now, replace(now.restrictions, conventions=others))


def gather(now: SearchState) -> SearchState | None:
    """Let what no op can use in parts be gathered as it is read.

    Over memory all of it; where least memory is asked for, if it is more than the slack of bytes.
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
        states, can = (
            unpinned.costs.states,
            possible(unpinned.network, unpinned.small) if unpinned.small else {},
        )
    least = SLACK if isinstance(found, Solution) else 0
    more = unsplittable(now.task.graph, states, can, least) - restrictions.gathered
    if not more:
        return None
    gathered = restrictions.gathered | more
    conventions = now.asked.conventions
    return attempt(now, replace(restrictions, gathered=gathered, conventions=conventions))


def split_attention(now: SearchState) -> SearchState | None:
    """Where the slack of bytes was spent on attention: with all its weights split.

    But not where something says what a rank may hold.
    """
    found = now.outcome
    if not isinstance(found, Solution) or found.objective.memory_bytes is not None:
        return None
    preferred, placed = projections(now.task.graph, found.layouts.states), found.layouts.assignment
    if all(placed[n] in preferred[n] for n in preferred.keys() - found.pinned.keys()):
        return None
    wanted = replace(now.restrictions, conventions=frozenset({TABLES, PROJECTIONS}))
    return replace(attempt(now, wanted), before=now)


def leave_attention(now: SearchState) -> SearchState | None:
    """Where that cannot be had: back to what was found without."""
    return now.before if isinstance(now.outcome, InfeasibleError) else None


def need_not_split_sequence(now: SearchState) -> SearchState | None:
    """Where nothing holds with hidden states split over cp: they need not be."""
    sequence, error = now.task.sequence, now.outcome
    if now.task.cp == 1 or not isinstance(error, InfeasibleError) or isinstance(error, OverMemory):
        return None
    if sequence is None or not sequence.handed:
        return None
    task = replace(now.task, sequence=sequence.loose())
    again = start(task, now.asked, now.restrictions)
    again = replace(again, conflicts=now.conflicts, over=now.over, beyond=now.beyond)
    return attempt(again, again.restrictions)


def try_out(now: SearchState) -> SearchState | None:
    """Run what was found on meta."""
    if not isinstance(now.outcome, Solution):
        return None
    return replace(now, outcome=dry_run(now.task, now.outcome, now.conflicts))


def forbid(now: SearchState) -> SearchState | None:
    """Where that failed: start over without the splits that did.

    Raises:
        SolverError: too many failed.
    """
    if not isinstance(now.outcome, Conflict):
        return None
    conflicts = (*now.conflicts, now.outcome)
    if len(conflicts) == ATTEMPTS:
        raise SolverError("no plan passed its dry run on meta: please report this model")
    failed = {(now.task.graph.one(name), shards) for name, shards in now.outcome.splits}
    restrictions = replace(now.restrictions, forbidden=now.restrictions.forbidden | failed)
    again = start(now.task, now.asked, restrictions)
    return replace(again, conflicts=conflicts, over=now.over, beyond=now.beyond)


def split_along_sequence(now: SearchState) -> SearchState | None:
    """Where nothing fits the memory: start over along the sequence, if nobody said whether to."""
    if not isinstance(now.outcome, OverMemory) or now.task.along_sequence is None:
        return None
    try:
        task = now.task.along_sequence()
    except InfeasibleError:  # it has no sequence to split
        return None
    return replace(start(task, now.asked), over=now.outcome)


class Step(NamedTuple):
    """What may be done next, in words, and how: None where it does not apply."""

    what: str
    take: Callable[[SearchState], SearchState | None]


FREE_TABLES = Step("infeasible: token embeddings sharded as is cheapest", free_tables)
"""Comes after each other step: that may have made a problem that cannot be solved with them."""

SOLVING = (
    Step("solve; for least memory, with token embeddings sharded by rows", solve_first),
    Step("does not fit the device: minimize memory instead", least_memory),
    Step("infeasible: hidden states need not be sharded over cp", need_not_split_sequence),
    Step(
        "does not fit, or many weights can only be used unsharded: all-gather them at each use",
        gather,
    ),
    Step("attention is replicated without need: shard it", split_attention),
    Step("infeasible: go back to attention as it was", leave_attention),
)
"""The way to a solution, which is optimal and checked, but not yet tried."""

LADDER = (
    *SOLVING,
    Step("run the plan on meta", try_out),
    Step("the dry run failed: forbid these splits and start over", forbid),
    Step(
        "does not fit: start over with hidden states sharded along the sequence",
        split_along_sequence,
    ),
)
"""The way to a plan."""

Tell = Callable[[str, SearchState], None]
"""Is told of each step that was taken: what it is for, and what came of it (see `record.py`)."""


def climb(
    now: SearchState, ladder: Sequence[Step] = LADDER, tell: Tell | None = None
) -> SearchState:
    """Take the steps of a ladder until they come to an outcome.

    Raises:
        ModelError: the model itself cannot run on meta.
        UsageError: a pin that cannot be meant.
        SolverError: the solver found nothing in time, or what it found does not hold.
    """
    while now.outcome is None:
        for what, take in (each for step in ladder for each in (step, FREE_TABLES)):
            then = take(now)
            if then is not None:
                now = then
                if tell is not None:
                    tell(what, now)
    return now


@apart
@uncollected()
def search(task: Task, asked: SolverOptions | None = None, tell: Tell | None = None) -> SearchState:
    """Where a search ends: its `plan` is the cheapest that passes its dry run.

    Raises:
        ModelError, UsageError, SolverError: as `climb`.
    """
    return climb(start(task, asked), LADDER, tell)


def run(task: Task, asked: SolverOptions | None = None, tell: Tell | None = None) -> Plan:
    """The cheapest plan that passes its dry run.

    Raises:
        InfeasibleError: none fits; where neither does along sequences, the message has the least
            of both. Or the pins cannot hold, or hidden states cannot be split along the sequence.
        ModelError, UsageError, SolverError: as `climb`.
    """
    return search(task, asked, tell).plan
