"""From a network to the best plan: what a byte costs, and who proves that nothing is better.

The price of a byte is the smallest power of two at which the plan needs no more than the least
possible bytes plus a slack; a user's own budget is a hard cap. What does not hang on the price is
eliminated first, once. The price is searched with the backtracking solver, whose elimination is
exact on these networks; then the solver that was asked for proves its answer, or finds a better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner.problem.objective import BYTE_PRICES, Digits, primary, rank
from shardwright.planner.solvers.backtracking import solve as warm_start
from shardwright.planner.solvers.bucket_elimination import Eliminated, eliminate
from shardwright.planner.solvers.presolve import Presolved, presolve
from shardwright.planner.solvers.problem import CostVector, Problem, Result, Solver

SLACK = 0.05
ROWS = 64
"""Tables of elimination are no larger here: what is left is for the solvers."""
SHARE, CAPPED = 0.5, 0.05
"""Shares of the time that the warm start may take; under a budget its search may be long."""


class OverBudget(InfeasibleError):
    """No plan holds as few bytes as were asked for."""

    def __init__(self, memory: int, floor: int, assignment: tuple[int, ...]) -> None:
        super().__init__(
            f"no plan fits {memory:,} bytes a rank: the least that would fit is {floor:,} bytes"
        )
        self.floor = floor
        """The fewest bytes that a plan holds."""
        self.assignment = assignment
        """Such a plan."""


@dataclass(frozen=True)
class Optimum:
    """The best assignment found, its costs, how far it is proven, and by whom."""

    assignment: tuple[int, ...]
    costs: CostVector
    byte_price: int
    """A byte costs 2**byte_price."""
    objective: int
    """Time and priced bytes: `objective.primary` of the costs."""
    bound: int
    """No plan has a lower objective."""
    optimal: bool
    from_warm_start: bool
    """Whether it is the warm start's answer, the other solver having proven nothing better."""


def optimize(
    small: Presolved,
    solve: Solver | None,
    seconds: float,
    memory: int | None = None,
    backup: Solver | None = None,
    *,
    movable: int,
) -> Optimum:
    """The cheapest assignment of a network of `planner/problem/builder.py`.

    Args:
        small: The network, simplified.
        solve: The solver that was asked for.
        seconds: Time limit for all calls of solvers together.
        memory: Budget in bytes a rank, if the user set one.
        backup: The solver where none was asked for; without it, that of the warm start.
        movable: Bytes that the slack is a share of (`CostFunctionNetwork.movable`).

    Raises:
        OverBudget: nothing fits; the message says the least that would.
        SolverError: the time ran out before any plan was found.
    """
    start = time.monotonic()
    by = solve or backup or warm_start
    share = 1 if by is warm_start else SHARE if memory is None else CAPPED
    middle = start + seconds * share
    digits = Digits.of(small.problem)
    left = eliminate(digits.split(small.problem), ROWS)

    def run(problem: Problem, caps: Mapping[int, int], hint: Sequence[int] | None) -> Result:
        result = warm_start(problem, 0, caps, hint, max(middle - time.monotonic(), 0.05))
        if result.assignment is None and hint is None:
            raise SolverError(
                f"no plan found within the time limit of {seconds:g} s: raise --time-limit"
            )
        return result

    def size(assignment: Sequence[int]) -> int:
        costs = left.problem.price(assignment)
        assert costs is not None, "a solver returned an assignment that a factor forbids"
        return costs[0]

    first = run(left.problem.weighed([(1 + left.problem.most(1), 1)]), {}, None)
    least = first.assignment or ()
    floor = size(least)
    if memory is not None and floor > memory:
        raise OverBudget(memory, floor, small.expand(left.expand(least)))

    def priced(byte_price: int) -> Problem:
        return left.problem.weighed(
            [digits.price(byte_price), (1, 0)][: 1 if memory is None else 2]
        )

    caps = {} if memory is None else {1: memory}
    trials: dict[int, Result] = {}

    def trial(byte_price: int) -> Result:
        if byte_price not in trials:
            result = run(priced(byte_price), caps, least)
            trials[byte_price] = result._replace(assignment=result.assignment or least)
        return trials[byte_price]

    byte_price = BYTE_PRICES.start  # bytes within a budget are nearly free
    if memory is None:
        budget = floor + int(SLACK * movable)
        fastest = run(left.problem.weighed([(0, 1)]), {}, least).assignment or least
        if size(fastest) > budget:
            guess = digits.guess(left.problem.price(least), left.problem.price(fastest))
            byte_price = _least(lambda p: size(trial(p).assignment or ()) <= budget, guess)
    return _proven(small, left, digits, byte_price, caps, trial(byte_price), by, start + seconds)


def _least(fits: Callable[[int], bool], guess: int) -> int:
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


def _proven(
    small: Presolved,
    left: Eliminated,
    digits: Digits,
    byte_price: int,
    caps: Mapping[int, int],
    found: Result,
    by: Solver,
    deadline: float,
) -> Optimum:
    """The warm_start's answer, or a better one of the solver that proves it.

    Raises:
        SolverError: the solver's answer breaks a factor or a cap.
    """
    network = small.problem
    best = left.expand(found.assignment or ())
    bound, optimal = digits.first(found.bound, byte_price), found.status == "optimal"
    from_warm_start = by is warm_start
    if not from_warm_start:
        weights = [digits.price(byte_price), (1, 0)]
        core = eliminate(left.problem.weighed(weights[: 1 + len(caps)]), ROWS)
        tidy = presolve(core.problem)
        assert tidy is not None, "elimination lost the warm start's answer"
        problem, unit = digits.fit(tidy.problem, byte_price)
        hint = tidy.contract(core.contract(found.assignment or ()))
        result = by(problem, 0, caps, hint, max(deadline - time.monotonic(), 0.05))
        if result.assignment is not None:
            costs = problem.price(result.assignment)
            if costs is None or any(costs[c] > cap for c, cap in caps.items()):
                raise SolverError("the solver returned an assignment that its problem forbids")
            other = left.expand(core.expand(tidy.expand(result.assignment)))
            best = min(best, other, key=lambda a: rank(network.price(a) or (), byte_price))
        bound = max(bound, result.bound // unit)
        optimal |= result.status == "optimal"
        from_warm_start = result.status != "optimal"
    costs = network.price(best)
    assert costs is not None, "a solver returned an assignment that a factor forbids"
    objective = primary(costs, byte_price)
    return Optimum(
        small.expand(best),
        costs,
        byte_price,
        objective,
        min(bound, objective),
        optimal,
        from_warm_start,
    )
