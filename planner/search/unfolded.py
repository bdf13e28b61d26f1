"""Carries a solution of the folded graph over to the unfolded graph: layouts, prices, the check."""

from __future__ import annotations

from shardwright.errors import SolverError
from shardwright.planner.blocks.unfold import Unfolded
from shardwright.planner.contract.plan_figures import Memory
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.memory import memory
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.problem.builder import BACKWARD, BYTES, TIME
from shardwright.planner.problem.optimize import Optimum
from shardwright.planner.search.task import Task, of_copies
from shardwright.planner.stages import stage
from shardwright.planner.strategies.states import States
from shardwright.planner.verify.check import check
from shardwright.planner.verify.recost import Bill, of_first_run


def unfolded_layouts(task: Task, layouts: Layouts) -> Layouts:
    """Return the layouts of the unfolded graph for layouts of the folded graph."""
    unfolded = task.unfolded
    if unfolded.graph is task.graph:
        return layouts
    return Layouts(unfolded.graph, task.unfolded_states, of_copies(layouts.assignment, unfolded))


def unfolded_bill(task: Task, layouts: Layouts, folded: Costs) -> Bill:
    """Return the bill of a plan, given its layouts on the unfolded graph."""
    costs = unfolded_costs(task, task.unfolded, layouts.states, folded)
    return Bill(costs, layouts.assignment)


def unfolded_costs(task: Task, unfolded: Unfolded, states: States, folded: Costs) -> Costs:
    """Return the prices of an unfolded graph."""
    sent = frozenset(copy for copy, n in unfolded.origin.items() if n in folded.gathered)
    keys = folded.sizes.keys.unfolded(unfolded.origin)
    return Costs(unfolded.graph, states.axes, states, task.workload, task.caches, sent, keys)


def memory_of(task: Task, bill: Bill, layouts: Layouts, folded: Costs) -> Memory:
    """Return the bytes that a rank holds in the first run, given the bill of the unfolded graph."""
    short, states = task.short
    costs = unfolded_costs(task, short, states, folded)
    first = of_first_run(bill)
    passing = of_first_run(Bill(costs, of_copies(layouts.assignment, short)))
    return memory(first.costs, first.assignment, (passing.costs, passing.assignment))


def checked(task: Task, costs: Costs, layouts: Layouts, optimum: Optimum) -> tuple[Layouts, Bill]:
    """Check a solution on the unfolded graph, and return its layouts and bill there.

    Args:
        task: The task.
        costs: Prices of the folded graph.
        layouts: The chosen layouts of the folded graph.
        optimum: The solver's answer, with the costs that it claims.

    Raises:
        SolverError: the solution breaks a rule, or has other costs than the solver claims.
    """
    stage("check")
    unfolded = unfolded_layouts(task, layouts)
    bill = unfolded_bill(task, unfolded, costs)
    alike = [op for op, _ in bill.ops]
    check(unfolded.graph, unfolded.states, unfolded.assignment, task.rigid, alike)
    if unfolded.graph is not task.graph:  # the folded graph has runs that are not unfolded
        check(task.graph, costs.states, layouts.assignment, task.rigid)
        Bill(costs, layouts.assignment).redistributions()
    agree(bill.price, optimum)
    return unfolded, bill


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
