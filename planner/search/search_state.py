"""Where a search stands: what was tried last, under which restrictions, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardwright.errors import InfeasibleError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.search.restrictions import Formulation, Restrictions
from shardwright.planner.search.solution import Solution, SolverOptions
from shardwright.planner.search.task import Task
from shardwright.planner.units import human_bytes
from shardwright.planner.wording import solver_in_words


@dataclass(frozen=True, eq=False)
class SearchState:
    """What is known at one point of a search.

    Attributes:
        task: What is planned.
        asked: How.
        restrictions: Those of the last attempt, or of the next if there is no outcome.
        outcome: What came of the last step; None before the first, and where all starts over.
        formulation: The problem that was solved last.
        before: Where to go back to if what is tried now cannot be had.
        conflicts: What dry runs failed at, in order.
        over: How much too much every plan without sequence parallelism takes, if this is with.
        beyond: How much every plan takes more than the device has, where that is so.
    """

    task: Task
    asked: SolverOptions
    restrictions: Restrictions
    outcome: Solution | InfeasibleError | Conflict | Plan | None = None
    formulation: Formulation | None = None
    before: SearchState | None = None
    conflicts: tuple[Conflict, ...] = ()
    over: OverMemory | None = None
    beyond: OverMemory | None = None

    @property
    def solution(self) -> Solution:
        """The solution that was found.

        Raises:
            InfeasibleError: there is none.
        """
        assert isinstance(self.outcome, (Solution, InfeasibleError)), "no solution was looked for"
        if isinstance(self.outcome, InfeasibleError):
            raise self._refusal(self.outcome)
        return self.outcome

    @property
    def plan(self) -> Plan:
        """The plan that passed its dry run.

        Raises:
            InfeasibleError: there is none.
        """
        assert isinstance(self.outcome, (Plan, InfeasibleError)), "no plan was looked for"
        if isinstance(self.outcome, InfeasibleError):
            raise self._refusal(self.outcome)
        plan = self.outcome
        if self.over is not None:
            budget = f"{self.over.budget:,} bytes a rank"
            plan = plan.noted(f"sequence parallel: without, no plan fits {budget}")
        if self.beyond is not None:
            on = f"{human_bytes(self.beyond.budget)} of {self.task.workload.device}"
            plan = plan.noted(f"planned for least memory: no plan was found that fits the {on}")
        return plan

    def _refusal(self, error: InfeasibleError) -> InfeasibleError:
        """What to say where nothing fits: of two ways, that which takes less."""
        if self.over is None:
            return error
        if not isinstance(error, OverMemory) or error.least >= self.over.least:
            return self.over
        return OverMemory(error.budget, error.least, error.held, ", with sequence parallelism")


def start(
    task: Task,
    asked: SolverOptions | None = None,
    restrictions: Restrictions | None = None,
    earlier: Formulation | None = None,
) -> SearchState:
    """Nothing tried yet; by default the task's own pins are all that restricts it.

    The conventions are those of what is asked for. Of an earlier problem of the same task what is
    still true is not worked out again.
    """
    asked = asked or SolverOptions()
    given = replace(restrictions or Restrictions(task.pins), conventions=asked.conventions)
    return SearchState(task, asked, given, formulation=earlier)


@dataclass(frozen=True)
class Attempt:
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


def attempted(what: str, now: SearchState) -> Attempt:
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
    return Attempt(what, now.restrictions, text, figures)
