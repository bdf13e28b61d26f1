"""A search as a list of what was tried, for those who ask why a plan came out as it did.

found = []
run(task, asked, tell=lambda what, now: found.append(attempted(what, now)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.errors import InfeasibleError
from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.search.restrictions import Restrictions
from shardwright.planner.search.situation import Situation
from shardwright.planner.search.solution import Solution
from shardwright.planner.wording import solver_in_words


@dataclass(frozen=True)
class Attempted:
    """One step of a search: what it was for, under which restrictions, and what came of it.

    Attributes:
        what: As `ladder.py` says it.
        restrictions: Those of the problem that was solved, or, where all starts over, will be.
        outcome: In words.
        figures: Numbers of it, by name: bytes, nanoseconds, counts.
    """

    what: str
    restrictions: Restrictions
    outcome: str
    figures: Mapping[str, int] = field(default_factory=dict)


def attempted(what: str, now: Situation) -> Attempted:
    """The record of a step that was just taken."""
    match now.outcome:
        case None:
            text, figures = "starts over", {"forbidden": len(now.restrictions.forbidden)}
        case Solution() as found:
            price = found.bill.price
            text = solver_in_words(found.report)
            figures = {"bytes": price.bytes, "time_ns": price.time, "held": found.memory.total}
        case OverMemory() as error:
            text, figures = str(error), {"budget": error.budget, "least": error.least}
        case InfeasibleError() as error:
            text, figures = str(error), {}
        case Conflict() as conflict:
            where = f" in '{conflict.module}'" if conflict.module else ""
            text, figures = f"fails{where}: {conflict.text}", {"splits": len(conflict.splits)}
        case _:
            text, figures = "holds", {"failed before": len(now.conflicts)}
    return Attempted(what, now.restrictions, text, figures)
