"""Where a search stands: what was tried last, under which restrictions, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.errors import InfeasibleError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.search.restrictions import Formulation, Restrictions
from shardwright.planner.search.solution import Asked, Solution
from shardwright.planner.search.task import Task
from shardwright.planner.units import human_bytes


@dataclass(frozen=True, eq=False)
class Situation:
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
    asked: Asked
    restrictions: Restrictions
    outcome: Solution | InfeasibleError | Conflict | Plan | None = None
    formulation: Formulation | None = None
    before: Situation | None = None
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
    asked: Asked | None = None,
    restrictions: Restrictions | None = None,
    earlier: Formulation | None = None,
) -> Situation:
    """Nothing tried yet; by default the task's own pins are all that restricts it.

    The conventions are those of what is asked for. Of an earlier problem of the same task what is
    still true is not worked out again.
    """
    asked = asked or Asked()
    given = replace(restrictions or Restrictions(task.pins), conventions=asked.conventions)
    return Situation(task, asked, given, formulation=earlier)
