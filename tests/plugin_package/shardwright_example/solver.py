"""A solver: ours is the built-in backtracking with twice the time."""

from collections.abc import Mapping

from shardwright.planner.solvers import backtracking
from shardwright.planner.solvers.problem import Problem, Result


def solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: tuple[int, ...] | None,
    seconds: float,
) -> Result:
    """The least value of a component of the price, under caps on others."""
    return backtracking.solve(problem, component, caps, hint, 2 * seconds)
