"""What is tried after what, from the cheapest plan of all to the first that passes its dry run.

`LADDER` is the whole policy. Its steps are taken in order; one that does not apply to what came of
those before it changes nothing. Where a step takes the outcome away, all starts over from the top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.garbage import uncollected
from shardwright.planner.search import steps
from shardwright.planner.search.situation import Situation, start
from shardwright.planner.search.solution import Asked
from shardwright.planner.search.task import Task
from shardwright.planner.trace.trace_lock import apart


class Step(NamedTuple):
    """What may be done next, in words, and how: None where it does not apply."""

    what: str
    take: Callable[[Situation], Situation | None]


TABLES_FREE = Step("infeasible: tables of tokens split as is cheapest", steps.free_tables)

SOLVING = (
    Step("solve; for least memory, with tables of tokens split by rows", steps.solve_first),
    Step("over the memory of the device: for least memory instead", steps.least_memory),
    TABLES_FREE,
    Step("infeasible: hidden states need not be split over cp", steps.hand_on_whole),
    TABLES_FREE,
    Step("over memory, or much can be used whole only: gather such weights", steps.gather),
    TABLES_FREE,
    Step("attention is replicated without need: split it", steps.split_attention),
    TABLES_FREE,
    Step("infeasible: leave attention as it was", steps.leave_attention),
)
"""The way to a solution, which is optimal and checked, but not yet tried."""

LADDER = (
    *SOLVING,
    Step("run the plan on meta", steps.try_out),
    Step("the dry run failed: forbid these splits, and start over", steps.forbid),
    Step("over memory: start over with hidden states split along the sequence", steps.go_along),
)
"""The way to a plan."""

Tell = Callable[[str, Situation], None]
"""Is told of each step that was taken: what it is for, and what came of it (see `record.py`)."""


def climb(now: Situation, ladder: Sequence[Step] = LADDER, tell: Tell | None = None) -> Situation:
    """Take the steps of a ladder until they come to an outcome.

    Raises:
        ModelError: the model itself cannot run on meta.
        UsageError: a pin that cannot be meant.
        SolverError: the solver found nothing in time, or what it found does not hold.
    """
    while now.outcome is None:
        for step in ladder:
            then = step.take(now)
            if then is not None:
                now = then
                if tell is not None:
                    tell(step.what, now)
    return now


@apart
@uncollected()
def search(task: Task, asked: Asked | None = None, tell: Tell | None = None) -> Situation:
    """Where a search ends: its `plan` is the cheapest that passes its dry run.

    Raises:
        ModelError, UsageError, SolverError: as `climb`.
    """
    return climb(start(task, asked), LADDER, tell)


def run(task: Task, asked: Asked | None = None, tell: Tell | None = None) -> Plan:
    """The cheapest plan that passes its dry run.

    Raises:
        InfeasibleError: none fits; where neither does along sequences, the message has the least
            of both. Or the pins cannot hold, or hidden states cannot be split along the sequence.
        ModelError, UsageError, SolverError: as `climb`.
    """
    return search(task, asked, tell).plan
