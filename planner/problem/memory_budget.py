"""Keeps a plan within a memory budget, of which the solver sees only the bytes that add up.

The activations that are alive at one time depend on the complete plan. So the solver gets the
budget as its cap, the memory of its plan is measured, and if that is too much, the cap is lowered
by the excess. This takes a few steps. It does not prove that no plan fits.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwright.errors import InfeasibleError
from shardwright.planner.problem.builder import BYTES
from shardwright.planner.problem.optimize import Optimum, OverBudget


class OverMemory(InfeasibleError):
    """No plan was found that fits the budget, including activations."""

    def __init__(self, budget: int, least: int, held: str, how: str = "", passing: int = 0) -> None:
        super().__init__(
            f"no plan fits {budget:,} bytes a rank: the least found that would fit is {least:,} "
            f"bytes{how}: {held}"
        )
        self.budget = budget
        self.least = least
        """The fewest bytes of any plan that was found."""
        self.held = held
        """What takes these bytes, in words."""
        self.passing = passing
        """How many of these bytes do not add up over tensors: of activations that come and go."""


def within(
    budget: int | None,
    solve: Callable[[int | None], Optimum],
    measure: Callable[[tuple[int, ...]], int],
    explain: Callable[[tuple[int, ...]], str],
) -> Optimum:
    """Return an optimum that holds at most `budget` bytes.

    Args:
        budget: Bytes that a rank may hold; None for no limit.
        solve: Solves under a cap on the bytes that add up.
        measure: Returns all bytes that a rank holds with an assignment.
        explain: Describes what takes the bytes of an assignment.

    Raises:
        OverMemory: none was found; the message has the smallest found, with what takes its bytes.
    """
    if budget is None:
        return solve(None)
    cap, tried, found = budget, set[int](), list[tuple[int, tuple[int, ...], int]]()
    while cap not in tried:
        tried.add(cap)
        try:
            optimum = solve(cap)
        except OverBudget as error:
            found.append((measure(error.assignment), error.assignment, error.floor))
            if found[-1][0] > budget:
                break
            cap = error.floor
            continue
        held = measure(optimum.assignment)
        if held <= budget:
            return optimum
        found.append((held, optimum.assignment, optimum.costs[BYTES]))
        cap = optimum.costs[BYTES] - (held - budget)
    least, assignment, added_up = min(found)
    raise OverMemory(budget, least, explain(assignment), passing=least - added_up)
