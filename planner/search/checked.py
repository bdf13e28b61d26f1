"""A solver's answer on the graph of all blocks: does it hold, and does it cost what was claimed?"""

from __future__ import annotations

from shardwright.errors import SolverError
from shardwright.planner.cost.cost import Costs
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.problem.builder import BACKWARD, BYTES, TIME
from shardwright.planner.problem.optimize import Optimum
from shardwright.planner.search.task import Task
from shardwright.planner.search.unfolded import unfolded_bill, unfolded_layouts
from shardwright.planner.stages import stage
from shardwright.planner.verify.check import check
from shardwright.planner.verify.recost import Bill


def checked(task: Task, costs: Costs, layouts: Layouts, optimum: Optimum) -> tuple[Layouts, Bill]:
    """The layouts of all blocks, and their bill.

    Args:
        task: What is planned.
        costs: Prices of its folded graph.
        layouts: What was chosen for that.
        optimum: The answer, with what the solver claims that it costs.

    Raises:
        SolverError: it does not hold, or costs something else.
    """
    stage("check")
    unfolded = unfolded_layouts(task, layouts)
    bill = unfolded_bill(task, unfolded, costs)
    alike = [op for op, _ in bill.ops]
    check(unfolded.graph, unfolded.states, unfolded.assignment, task.rigid, alike)
    if unfolded.graph is not task.graph:  # which has runs that are not unfolded
        check(task.graph, costs.states, layouts.assignment, task.rigid)
        Bill(costs, layouts.assignment).redistributions()
    agree(bill.price, optimum)
    return unfolded, bill


def agree(found: tuple[int, int, int], optimum: Optimum) -> None:
    """Compare the checker's price with the solver's.

    Raises:
        SolverError: they differ; such a plan is never written.
    """
    claimed = (optimum.costs[BYTES], optimum.costs[TIME], optimum.costs[BACKWARD])
    if found != claimed:
        raise SolverError(
            f"the solver claims bytes and times {claimed}, the checker finds {found}: "
            "please report it"
        )
