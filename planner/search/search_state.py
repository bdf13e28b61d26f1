"""The state of a search (`SearchState`), and the record of its steps (`Attempt`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardwright.errors import InfeasibleError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.search.restrictions import Formulation, Restrictions
from shardwright.planner.search.solution import Solution, SolverOptions
from shardwright.planner.search.task import Task
from shardwright.planner.units import human_bytes
from shardwright.planner.wording import solver_in_words

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SearchState:
    """The state of a search after a step.

    Attributes:
        task: The task.
        asked: The options.
        restrictions: Restrictions of the last attempt, or of the next if there is no outcome.
        outcome: Outcome of the last step. None before the first step and when the search restarts.
        formulation: The problem that was solved last.
        before: The state to go back to if the current attempt is infeasible.
        conflicts: Conflicts of the dry runs that failed, in order.
        error_without_sp: The memory error without sequence parallelism, if the search now uses it.
        error_on_device: The memory error of the device, if the search now looks for least memory.
        without_recompute: The state in which no plan fits with all activations kept, if all blocks
            are now computed again.
        no_time_to: What the time limit left no time for, though it might have made the solution
            better.
    """

    task: Task
    asked: SolverOptions
    restrictions: Restrictions
    outcome: Solution | InfeasibleError | Conflict | Plan | None = None
    formulation: Formulation | None = None
    before: SearchState | None = None
    conflicts: tuple[Conflict, ...] = ()
    error_without_sp: OverMemory | None = None
    error_on_device: OverMemory | None = None
    without_recompute: SearchState | None = None
    no_time_to: tuple[str, ...] = ()

    def restart(
        self, task: Task | None = None, restrictions: Restrictions | None = None
    ) -> SearchState:
        """Return the first state of a new search, with the conflicts and errors of this one."""
        return replace(
            start(task or self.task, self.asked, restrictions or self.restrictions),
            conflicts=self.conflicts,
            error_without_sp=self.error_without_sp,
            error_on_device=self.error_on_device,
        )

    @property
    def solution(self) -> Solution:
        """The solution of the search, checked.

        Raises:
            InfeasibleError: there is no solution.
            SolverError: as `Solution.checked`.
        """
        return self._found(Solution).checked

    @property
    def plan(self) -> Plan:
        """The plan that passed its dry run, with the notes of the search.

        Raises:
            InfeasibleError: there is no plan.
        """
        plan = self._found(Plan)
        if self.error_without_sp is not None:
            budget = f"{self.error_without_sp.budget:,} bytes a rank"
            plan = plan.noted(
                f"sequence parallelism is on, because no plan fits {budget} without it"
            )
        if self.error_on_device is not None:
            on = f"{human_bytes(self.error_on_device.budget)} of {self.task.workload.device}"
            plan = plan.noted(f"planned for least memory: no plan was found that fits the {on}")
        for what in self.no_time_to:
            plan = plan.noted(f"there was no time left to {what}: raise --time-limit")
        return plan

    def _found(self, kind: type[T]) -> T:
        """Return the outcome, which is of this kind if it is no error."""
        if isinstance(self.outcome, InfeasibleError):
            raise self._refusal(self.outcome)
        assert isinstance(self.outcome, kind), "the search looked for something else"
        return self.outcome

    def _refusal(self, error: InfeasibleError) -> InfeasibleError:
        """Return the error to raise: with or without sequence parallelism, that of less memory."""
        if self.error_without_sp is None:
            return error
        if not isinstance(error, OverMemory) or error.least >= self.error_without_sp.least:
            return self.error_without_sp
        return OverMemory(error.budget, error.least, error.held, ", with sequence parallelism")


def start(
    task: Task,
    asked: SolverOptions | None = None,
    restrictions: Restrictions | None = None,
    earlier: Formulation | None = None,
) -> SearchState:
    """Return the state of a search before its first step.

    Args:
        task: The task.
        asked: The options; they set the first conventions.
        restrictions: The restrictions. The default is the task's pins.
        earlier: Another formulation of the same task, whose parts may be reused.
    """
    asked = asked or SolverOptions()
    given = replace(restrictions or Restrictions(task.pins), conventions=asked.conventions)
    return SearchState(task, asked, given, formulation=earlier)


@dataclass(frozen=True)
class Attempt:
    """The record of one step of a search.

    Attributes:
        what: Description of the step, from `ladder.py`.
        restrictions: Restrictions of the solved problem, or of the next one after a restart.
        outcome: The outcome in words.
        figures: Numbers of the outcome by name: bytes, nanoseconds, counts.
    """

    what: str
    restrictions: Restrictions
    outcome: str
    figures: Mapping[str, int] = field(default_factory=dict)


def attempted(what: str, now: SearchState) -> Attempt:
    """Return the record of the step that led to the state `now`."""
    match now.outcome:
        case None:
            text, figures = "starts over", {"forbidden": len(now.restrictions.forbidden)}
        case Solution() as found:
            price, held = found.unfolded.bill.price, found.unfolded.memory.total
            text = solver_in_words(found.report)
            figures = {"bytes": price.bytes, "time_ns": price.time, "held": held}
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
