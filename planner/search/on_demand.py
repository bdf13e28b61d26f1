"""Sequence parallelism where memory asks for it: if nothing fits a budget without, plan with it."""

from __future__ import annotations

from shardwright.errors import InfeasibleError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.garbage import uncollected
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.planner.search.search import Search
from shardwright.planner.trace.one_at_a_time import apart


@apart
@uncollected()
def run(search: Search, solver: str | None, seconds: float, memory: int | None) -> Plan:
    """The plan of `search`, or of the same along sequences where that alone fits the memory.

    Raises:
        InfeasibleError: as `Search.run`; where neither fits, the message has the least of both.
        SolverError: as `Search.run`.
    """
    try:
        return search.run(solver, seconds, memory)
    except OverMemory as error:
        if search.along_sequence is None:
            raise
        without = error
    try:
        plan = search.along_sequence().run(solver, seconds, memory)
    except OverMemory as error:
        if error.least >= without.least:
            raise without from None
        how = ", with sequence parallelism"
        raise OverMemory(error.budget, error.least, error.held, how) from None
    except InfeasibleError:  # it has no sequence to split, or its ops forbid it
        raise without from None
    return plan.noted(f"sequence parallel: without, no plan fits {without.budget:,} bytes a rank")
