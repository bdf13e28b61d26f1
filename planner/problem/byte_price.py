"""What a byte costs: as little as makes a plan hold few enough of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from shardwright.planner.problem.objective import BYTE_PRICES
from shardwright.planner.problem.warm_start import WarmStart
from shardwright.planner.solvers.problem import Result


def find_byte_price(
    warm_start: WarmStart, least: tuple[int, ...], budget: int | None
) -> tuple[int, Result]:
    """The smallest of `BYTE_PRICES` at which the best plan holds `budget` bytes, and that plan.

    Args:
        warm_start: Finds the best plan at a price.
        least: The plan of fewest bytes, which are within the budget.
        budget: In bytes; None where a cap sees to it, so that bytes may be nearly free.
    """

    @cache
    def best(price: int) -> Result:
        return warm_start.best(price, least)

    def size(assignment: tuple[int, ...] | None) -> int:
        return problem.accept(assignment or ())[0]

    problem, price = warm_start.problem, BYTE_PRICES.start
    if budget is not None:
        fastest = warm_start.fastest(least)
        if size(fastest) > budget:
            guess = warm_start.digits.guess(problem.accept(least), problem.accept(fastest))
            price = _smallest(lambda p: size(best(p).assignment) <= budget, guess)
    return price, best(price)


def _smallest(fits: Callable[[int], bool], guess: int) -> int:
    """The smallest of `BYTE_PRICES` that fits (if any but the last), looked for around a guess."""
    low, high, at, step = BYTE_PRICES.start - 1, BYTE_PRICES.stop - 1, guess, 1
    while high - low > 1:
        if not low < at < high:
            at = (low + high) // 2
        if fits(at):
            high, at = at, at - step
        else:
            low, at = at, at + step
        step *= 2
    return high
