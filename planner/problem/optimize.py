"""From a network to the best plan: what a byte costs, and who proves that nothing is better.

The price of a byte is the smallest power of two at which the plan needs no more than the least
possible bytes plus a slack; a user's own budget is a hard cap. What does not hang on the price is
eliminated first, once. The price is searched with the backtracking solver (`byte_price.py`, from
`warm_start.py`); then the solver that was asked for proves its answer, or finds a better.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner.problem.byte_price import find_byte_price
from shardwright.planner.problem.objective import Digits, primary
from shardwright.planner.problem.warm_start import WarmStart
from shardwright.planner.solvers import backtracking
from shardwright.planner.solvers.bucket_elimination import eliminate
from shardwright.planner.solvers.presolve import Presolved, presolve
from shardwright.planner.solvers.problem import CostVector, Problem, Result, Solver
from shardwright.planner.solvers.reduction import Step, chain, solve_reduced

SLACK = 0.05
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
    """The power of two: one of `objective.BYTE_PRICES`."""
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
        small: The network, presolved.
        solve: The solver that was asked for.
        seconds: Time limit for all calls of solvers together.
        memory: Budget in bytes a rank, if the user set one.
        backup: The solver where none was asked for; without it, backtracking.
        movable: Bytes that the slack is a share of (`CostFunctionNetwork.movable`).

    Raises:
        OverBudget: nothing fits; the message says the least that would.
        SolverError: the time ran out before any plan was found, or the solver's answer breaks a
            factor or a cap.
    """
    start = time.monotonic()
    prover = solve or backup or backtracking.solve
    alone = prover is backtracking.solve
    share = 1 if alone else SHARE if memory is None else CAPPED
    caps = {} if memory is None else {1: memory}

    digits = Digits.of(small.problem)
    left = chain(small.problem, digits.split, eliminate)
    warm_start = WarmStart(left.problem, digits, caps, start + seconds * share)
    least = warm_start.least()
    if least is None:
        raise SolverError(
            f"no plan found within the time limit of {seconds:g} s: raise --time-limit"
        )
    floor = left.problem.accept(least)[0]
    if memory is not None and floor > memory:
        raise OverBudget(memory, floor, small.expand(left.expand(least)))
    budget = floor + int(SLACK * movable) if memory is None else None
    price, found = find_byte_price(warm_start, least, budget)
    best, proven = found, False
    if not alone:
        steps = eliminate, presolve, partial(digits.fit, price=price)
        end = start + seconds
        best, proven = _prove(warm_start.priced(price), found, steps, prover, caps, end)

    assignment = left.expand(best.assignment or ())
    costs = small.problem.accept(assignment)
    objective = primary(costs, price)
    bound = min(digits.first(best.bound, price), objective)
    optimal = best.status == "optimal"
    return Optimum(small.expand(assignment), costs, price, objective, bound, optimal, not proven)


def _prove(
    problem: Problem,
    found: Result,
    steps: Sequence[Step],
    prover: Solver,
    caps: Mapping[int, int],
    deadline: float,
) -> tuple[Result, bool]:
    """The cheaper of what was found and the prover's answer, and whether the prover proved it.

    The bound is the higher of both.

    Args:
        problem: Component 0 is minimised.
        found: By the warm start.
        steps: What is done to the problem before the prover sees it.
        prover: A solver.
        caps: Component -> what it may be.
        deadline: Of `time.monotonic`.
    """
    seconds = deadline - time.monotonic()
    result = solve_reduced(problem, steps, prover, caps, found.assignment, seconds)
    answers = [r.assignment for r in (found, result) if r.assignment is not None]
    best = min(answers, key=lambda answer: problem.accept(answer)[0])
    proven = result.status == "optimal"
    status = result.status if proven else found.status
    return Result(status, best, max(found.bound, result.bound)), proven
