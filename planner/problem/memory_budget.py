"""Keep a whole plan within a budget, of which the solver only sees the part that adds up.

The activations that are alive at one time depend on the whole plan. So the solver gets the budget,
its plan is measured, and if that is too much, the solver's part is lowered by the excess. So a plan
is found in a few steps; that there is no other is not proven.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwright.errors import InfeasibleError
from shardwright.planner.problem.builder import BYTES
from shardwright.planner.problem.optimize import Optimum, OverBudget


class OverMemory(InfeasibleError):
    """No plan was found that holds as few bytes as were asked for, activations and all."""

    def __init__(self, budget: int, least: int, held: str, how: str = "") -> None:
        super().__init__(
            f"no plan fits {budget:,} bytes a rank: the least found that would fit is {least:,} "
            f"bytes{how}: {held}"
        )
        self.budget = budget
        self.least = least
        """The fewest bytes of those that were found."""
        self.held = held
        """What takes them, in words."""


def within(
    budget: int | None,
    solve: Callable[[int | None], Optimum],
    measure: Callable[[tuple[int, ...]], int],
    explain: Callable[[tuple[int, ...]], str],
) -> Optimum:
    """The optimum of `solve(bytes that add up)` that `measure` finds to hold `budget` at most.

    Raises:
        OverMemory: none was found; the message says what the smallest that was found takes, and
            explains it.
    """
    if budget is None:
        return solve(None)
    cap, tried, found = budget, set[int](), list[tuple[int, tuple[int, ...]]]()
    while cap not in tried:
        tried.add(cap)
        try:
            optimum = solve(cap)
        except OverBudget as error:
            found.append((measure(error.assignment), error.assignment))
            if found[-1][0] > budget:
                break
            cap = error.floor
            continue
        held = measure(optimum.assignment)
        if held <= budget:
            return optimum
        found.append((held, optimum.assignment))
        cap = optimum.costs[BYTES] - (held - budget)
    least, assignment = min(found)
    raise OverMemory(budget, least, explain(assignment))
