"""What a byte costs, by what is asked for.

Least memory: as little as makes a plan hold few enough bytes.

Least time: T / (M - W), for T the time of the plan, W what a rank holds with it, and M what it may
hold. What is left, M - W, holds the KV cache and the activations of more sequences. So what can be
done in a time grows with (M - W) / T, and at the plan where T / (M - W) is least, one byte more is
worth just that fraction of the time. The plan and the price follow from each other; begun at the
plan of fewest bytes, each step to the plan that is best at the price of the last makes the fraction
smaller, until it stays (Dinkelbach, "On nonlinear fractional programming", Management Science
13(7), 1967). As the price is never below that fraction, each of these plans is within M, and no
solver needs a cap. Prices are powers of two, so few steps are taken, and plans do not hang on the
last digit of a size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from shardwright.planner.problem.objective import BYTE_PRICES
from shardwright.planner.problem.warm_start import WarmStart
from shardwright.planner.solvers.problem import Result


def price_for_time(
    warm_start: WarmStart, least: tuple[int, ...], memory: int
) -> tuple[int, Result]:
    """The power of two next above T / (M - W) of the plan that is best at it, and that plan.

    Where that is not one of `BYTE_PRICES`, the next that is.

    Args:
        warm_start: Finds the best plan at a price.
        least: The plan of fewest bytes, which are within `memory`.
        memory: M, in bytes.
    """
    found, price = Result("feasible", least, 0), BYTE_PRICES.stop  # which is none of them
    while True:
        held, rest = warm_start.problem.accept(found.assignment or ())
        now = _ratio(warm_start.digits.spent(rest), memory - held)
        if now == price:
            return price, found
        price, found = now, warm_start.best(now, found.assignment or ())


def _ratio(spent: int, left: int) -> int:
    """The smallest price at which the bytes that are left cost what is spent."""
    return next((p for p in BYTE_PRICES if _shifted(left, p) >= spent), BYTE_PRICES[-1])


def _shifted(n: int, by: int) -> int:
    return n << by if by > 0 else n >> -by


def price_for_memory(
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
