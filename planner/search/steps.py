"""The steps of a search: each a function of where it stands, None where it does not apply."""

from __future__ import annotations

from dataclasses import replace

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.problem.conventions import PROJECTIONS, TABLES, projections
from shardwright.planner.problem.gathered import unsplittable
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.problem.optimize import SLACK
from shardwright.planner.search.dry_run import dry_run
from shardwright.planner.search.restrictions import Bare, Restrictions, formulate
from shardwright.planner.search.situation import Situation, start
from shardwright.planner.search.solution import Solution, possible, solve
from shardwright.planner.strategies.states import States

ATTEMPTS = 40
"""How many plans may fail their dry run before the search gives up."""


def attempt(now: Situation, restrictions: Restrictions) -> Situation:
    """Solve the problem under other restrictions."""
    formulation = None
    try:
        formulation = formulate(now.task, restrictions, now.formulation)
        outcome = solve(now.task, formulation, now.asked)
    except InfeasibleError as error:
        outcome = error.with_traceback(None)  # which would keep all of this attempt
    return replace(now, restrictions=restrictions, formulation=formulation, outcome=outcome)


def solve_first(now: Situation) -> Situation | None:
    """Solve the problem as it stands."""
    return attempt(now, now.restrictions) if now.outcome is None else None


def least_memory(now: Situation) -> Situation | None:
    """Where nothing fits the device: for least memory."""
    asked, error = now.asked, now.outcome
    if not isinstance(error, OverMemory) or not asked.may_be_over:
        return None
    asked = replace(asked, objective="memory")
    again = start(now.task, asked, now.restrictions)
    again = replace(again, formulation=now.formulation, conflicts=now.conflicts, beyond=error)
    return attempt(again, again.restrictions)


def free_tables(now: Situation) -> Situation | None:
    """Where nothing holds with tables of tokens split by rows: without that."""
    if not isinstance(now.outcome, InfeasibleError) or now.formulation is None:
        return None
    if TABLES not in now.formulation.followed:
        return None
    others = now.restrictions.conventions - {TABLES}
    return attempt(now, replace(now.restrictions, conventions=others))


def gather(now: Situation) -> Situation | None:
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
        states, can = _without_pins(now.formulation.bare)
    least = SLACK if isinstance(found, Solution) else 0
    more = unsplittable(now.task.graph, states, can, least) - restrictions.gathered
    if not more:
        return None
    gathered = restrictions.gathered | more
    conventions = now.asked.conventions
    return attempt(now, replace(restrictions, gathered=gathered, conventions=conventions))


def _without_pins(bare: Bare) -> tuple[States, dict[str, bool]]:
    """Domains, and which tensors a solution without pins and conventions could split."""
    return bare.costs.states, possible(bare.network, bare.small) if bare.small else {}


def split_attention(now: Situation) -> Situation | None:
    """Where the slack of bytes was spent on attention: with all its weights split.

    But not where something says what a rank may hold.
    """
    found = now.outcome
    if not isinstance(found, Solution) or found.objective.memory_bytes is not None:
        return None
    usual, placed = projections(now.task.graph, found.layouts.states), found.layouts.assignment
    if all(placed[n] in usual[n] for n in usual.keys() - found.pinned.keys()):
        return None
    wanted = replace(now.restrictions, conventions=frozenset({TABLES, PROJECTIONS}))
    return replace(attempt(now, wanted), before=now)


def leave_attention(now: Situation) -> Situation | None:
    """Where that cannot be had: back to what was found without."""
    return now.before if isinstance(now.outcome, InfeasibleError) else None


def hand_on_whole(now: Situation) -> Situation | None:
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


def try_out(now: Situation) -> Situation | None:
    """Run what was found on meta."""
    if not isinstance(now.outcome, Solution):
        return None
    return replace(now, outcome=dry_run(now.task, now.outcome, now.conflicts))


def forbid(now: Situation) -> Situation | None:
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


def go_along(now: Situation) -> Situation | None:
    """Where nothing fits the memory: start over along the sequence, if nobody said whether to."""
    if not isinstance(now.outcome, OverMemory) or now.task.along_sequence is None:
        return None
    try:
        task = now.task.along_sequence()
    except InfeasibleError:  # it has no sequence to split
        return None
    return replace(start(task, now.asked), over=now.outcome)
