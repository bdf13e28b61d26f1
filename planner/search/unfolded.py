"""Carries a solution of the folded graph over to the unfolded graph: layouts, prices, the check."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.errors import SolverError
from shardwright.planner.blocks.unfold import Unfolded
from shardwright.planner.contract.plan_figures import Memory
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.memory import memory
from shardwright.planner.emit.drawing import Copies
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.problem.builder import BACKWARD, BYTES, TIME
from shardwright.planner.problem.optimize import Optimum
from shardwright.planner.search.task import Task, of_copies
from shardwright.planner.strategies.states import States
from shardwright.planner.verify.check import check
from shardwright.planner.verify.recost import Bill


@dataclass(frozen=True)
class UnfoldedSolution:
    """A solution on the unfolded graph, and on the short one (`Task.short`).

    Attributes:
        layouts: Layouts of the unfolded graph.
        bill: Prices of the unfolded graph.
        short: Layouts and prices of the short graph, and the blocks that it represents.
    """

    layouts: Layouts
    bill: Bill
    short: tuple[Layouts, Bill, Copies]

    @cached_property
    def memory(self) -> Memory:
        """The bytes that a rank holds in the first run."""
        return self._memory(None)

    @property
    def memory_by_rank(self) -> list[int]:
        """The same for each rank of tp; empty if all hold as much."""
        ranks = range(len(self.layouts.states.sub.weights))
        return [self._memory(rank).total for rank in ranks]

    def _memory(self, rank: int | None) -> Memory:
        first, passing = self.bill.first_run, self.short[1].first_run
        return memory(first.costs, first.assignment, (passing.costs, passing.assignment), rank)


def unfolded(task: Task, layouts: Layouts, folded: Costs) -> UnfoldedSolution:
    """Return the layouts of the folded graph, and its prices, on the unfolded graphs."""

    def priced(graph: Unfolded, states: States) -> tuple[Layouts, Bill]:
        found = Layouts(graph.graph, states, of_copies(layouts.assignment, graph))
        sent = frozenset(copy for copy, n in graph.origin.items() if n in folded.gathered)
        keys = folded.sizes.keys.unfolded(graph.origin)
        given = task.workload, task.caches, sent, keys
        return found, Bill(Costs(graph.graph, states.axes, states, *given), found.assignment)

    short, states = task.short
    folds = task.unfolded.graph is not task.graph
    full = priced(task.unfolded, task.unfolded_states if folds else layouts.states)
    return UnfoldedSolution(*full, (*priced(short, states), short.blocks))


def check_unfolded(
    task: Task, costs: Costs, layouts: Layouts, found: UnfoldedSolution, optimum: Optimum
) -> None:
    """Check a solution on the unfolded graph.

    Args:
        task: The task.
        costs: Prices of the folded graph.
        layouts: The chosen layouts of the folded graph.
        found: The solution on the unfolded graph.
        optimum: The solver's answer, with the costs that it claims.

    Raises:
        SolverError: the solution breaks a rule, or has other costs than the solver claims.
    """
    alike, there = [op for op, _ in found.bill.ops], found.layouts
    check(there.graph, there.states, there.assignment, task.rigid, alike)
    if there.graph is not task.graph:  # the folded graph has runs that are not unfolded
        check(task.graph, costs.states, layouts.assignment, task.rigid)
        Bill(costs, layouts.assignment).redistributions()  # raises if one has no route
    agree(found.bill.price, optimum)


def agree(found: tuple[int, int, int], optimum: Optimum) -> None:
    """Compare the checker's price with the solver's.

    Raises:
        SolverError: they differ. A plan with wrong costs is never written.
    """
    claimed = (optimum.costs[BYTES], optimum.costs[TIME], optimum.costs[BACKWARD])
    if found != claimed:
        raise SolverError(
            f"the solver claims bytes and times {claimed}, the checker finds {found}: "
            "please report it"
        )
