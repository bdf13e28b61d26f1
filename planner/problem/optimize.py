"""From a network to the best plan: what a byte costs, and who proves that nothing is better.

Least memory: as little as makes a plan hold few enough bytes: the least possible plus a slack. A
user's own budget is a hard cap, below which bytes are nearly free.

Least time: T / (M - W), for T the time of the plan, W what a rank holds with it, and M what it may
hold. What is left, M - W, holds the KV cache and the activations of more sequences. So what can be
done in a time grows with (M - W) / T, and at the plan where T / (M - W) is least, one byte more is
worth just that fraction of the time. The plan and the price follow from each other; begun at the
plan of fewest bytes, each step to the plan that is best at the price of the last makes the fraction
smaller, until it stays (Dinkelbach, "On nonlinear fractional programming", Management Science
13(7), 1967). As the price is never below that fraction, each of these plans is within M, and no
solver needs a cap. Prices are powers of two, so few steps are taken, and plans do not depend on the
last digit of a size.

Elimination finds the best plans at all prices at once (`solvers/elimination.py`). Then the solver
that was asked for proves the plan, or finds a better one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner.contract.plan_figures import ObjectiveName
from shardwright.planner.problem.builder import BYTES
from shardwright.planner.problem.objective import (
    BYTE_PRICES,
    Digits,
    primary,
    question,
    weighed_time,
)
from shardwright.planner.solvers import backtracking
from shardwright.planner.solvers.elimination import Elimination, assignment, hull, tables_of
from shardwright.planner.solvers.presolve import Presolved
from shardwright.planner.solvers.problem import CostVector, Problem, Result, Solver

SLACK = 0.05
SHARE = 0.5
"""Share of the time for the price of a byte."""
CAPPED = 0.05
"""Share for backtracking under a budget, before another solver is asked."""


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


class Proof(NamedTuple):
    """The best plan that is known, and what the solver that was asked for made of it."""

    result: Result
    proven: bool
    """Whether that solver proved it."""
    better: bool
    """Whether it is that solver's own, and cheaper than what it was told."""


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
    proven: Callable[[], bool]
    """Whether the solver that was asked for proved that; else backtracking did, or nobody.

    Where backtracking did, the other is at work when this is first asked for: so it may be beside
    something else.
    """
    better: bool
    """Whether that solver found it, and not elimination or backtracking before."""
    caps: Mapping[int, int]
    """Of the question (`objective.question`): its component 1 is the bytes."""


@dataclass
class PricedPlans:
    """The best plan of a network's problem at each price of a byte.

    Elimination gives all of them. Where its tables would be too large with fronts in their rows,
    backtracking is asked for each, and the solver where that runs out of time.
    """

    problem: Problem
    digits: Digits
    solver: Solver
    deadline: float
    """Of `time.monotonic`."""
    proven: bool = field(init=False)
    """Whether the plan that was given last is the best at its price."""

    def __post_init__(self) -> None:
        self._two = self.digits.bytes_and_rest(self.problem)
        sizes = {v: len(domain) for v, domain in enumerate(self.problem.domains)}
        work = Elimination(sizes, tables_of(self._two), hull)
        work.run(self.deadline)
        self.proven = not work.left
        self._points = work.front() if self.proven else []
        self._found: dict[int, Result] = {}

    def smallest(self) -> tuple[int, ...]:
        """The best of those that hold the fewest bytes."""
        return self._best(1 + self._two.most(1))

    def at(self, price: int) -> tuple[int, ...]:
        """The best where a byte costs 2**price."""
        return self._best(self.digits.byte_weight(price))

    def within(self, memory: int, price: int) -> tuple[int, ...]:
        """The best that is known, at a price, of those that hold no more bytes."""
        points = [p for p in self._points if p[0] <= memory]
        weight = self.digits.byte_weight(price)
        if not points:
            return self.smallest()
        return self._plan(min(points, key=lambda p: weight * p[0] + p[1])[2])

    def _plan(self, choices: object) -> tuple[int, ...]:
        return assignment(choices, len(self.problem.domains))

    def _best(self, weight: int) -> tuple[int, ...]:
        """The best where a byte costs `weight` of what all else is counted in.

        Raises:
            SolverError: the solver found none in time.
        """
        if self._points:
            return self._plan(min(self._points, key=lambda p: weight * p[0] + p[1])[2])
        if weight not in self._found:
            self._found[weight] = self._asked(weight)
        result = self._found[weight]
        self.proven = result.status == "optimal"
        if result.assignment is None:
            raise SolverError("no plan found within the time limit: raise --time-limit")
        return result.assignment

    def _asked(self, weight: int) -> Result:
        """The same by solvers, backtracking first: one cost a row takes less room than fronts."""
        problem = self._two.weighed([(weight, 1)])
        result = Result("unknown", None, 0)
        for solver in dict.fromkeys((backtracking.solve, self.solver)):
            seconds = max((self.deadline - time.monotonic()) / 4, 0.05)
            result = solver(problem, 0, {}, result.assignment, seconds)
            if result.status == "optimal":
                break
        return result


def optimize(
    small: Presolved,
    solve: Solver,
    seconds: float,
    memory: int | None = None,
    *,
    movable: int,
    objective: ObjectiveName = "memory",
) -> Optimum:
    """The cheapest assignment of a network of `planner/problem/builder.py`.

    Args:
        small: The network, presolved.
        solve: The solver that was asked for.
        seconds: Time limit for all calls of solvers together.
        memory: What a rank may hold, in bytes; for least time it must be given.
        movable: Bytes that the slack is a share of (`CostFunctionNetwork.movable`).
        objective: What is to be least.

    Raises:
        OverBudget: nothing fits; the message says the least that would.
        SolverError: the time ran out before any plan was found, or the solver's answer breaks a
            factor or a cap. So does `proven` of what is given, and where that answer is better than
            what was proven to be the best.
    """
    end = time.monotonic() + seconds
    problem, alone = small.problem, solve is backtracking.solve
    digits = Digits.of(problem)
    plans = PricedPlans(problem, digits, solve, end - (1 - SHARE) * seconds)
    least = plans.smallest()
    floor = problem.accept(least)[BYTES]
    if memory is not None and floor > memory:
        raise OverBudget(memory, floor, small.expand(least))
    if objective == "time" and memory is not None:
        price = _price_for_time(plans, memory)
        capped = price == BYTE_PRICES[-1]  # a higher one may be due: so the cap is said, too
    else:
        price = BYTE_PRICES.start if memory is not None else _price_for_memory(
            plans, floor + int(SLACK * movable)
        )  # fmt: skip
        capped = memory is not None
    caps = {1: memory} if capped and memory is not None else {}

    @cache
    def asked() -> Problem:
        return question(problem, price, bool(caps))

    @cache
    def proof() -> Proof:
        return prove(asked(), caps, found, solve, max(end - time.monotonic(), 0.05))

    if caps:
        hint = plans.within(caps[1], price)
        share = 1 if alone else CAPPED
        found = backtracking.solve(asked(), 0, caps, hint, share * (end - time.monotonic()))
    else:
        best = plans.at(price)
        found = Result("optimal" if plans.proven else "feasible", best, 0)

    result, better = found, False
    if found.status != "optimal" and not (alone and caps):
        result, better = proof().result, proof().better
    chosen = result.assignment or ()
    costs = problem.accept(chosen)
    value, optimal = primary(costs, price), result.status == "optimal"
    bound = value if optimal else min(result.bound // digits.below, value)
    return Optimum(
        small.expand(chosen), costs, price, value, bound, optimal,
        lambda: not alone and proof().proven, better, caps,
    )  # fmt: skip


def prove(
    asked: Problem, caps: Mapping[int, int], found: Result, solver: Solver, seconds: float
) -> Proof:
    """The cheaper of what was found and the solver's answer; the bound is the higher of both.

    Args:
        asked: What is asked (`objective.question`).
        caps: On other components.
        found: The best plan that is known, as the solver is told.
        solver: Who is asked.
        seconds: Time limit for that.

    Raises:
        SolverError: the solver's answer breaks a factor or a cap, or is cheaper than what was found
            and is said to be proven.
    """
    result = solver(asked, 0, caps, found.assignment, seconds)
    answers = [r.assignment for r in (found, result) if r.assignment is not None]
    costs = [asked.accept(answer, caps)[0] for answer in answers]
    best = min(range(len(answers)), key=costs.__getitem__)
    if best > 0 and found.status == "optimal":
        raise SolverError(
            f"nothing is proven to cost less than {costs[0]}, but a solver finds {costs[1]}: "
            "please report it"
        )
    proven = result.status == "optimal"
    status = result.status if proven else found.status
    return Proof(Result(status, answers[best], max(found.bound, result.bound)), proven, best > 0)


def _price_for_time(plans: PricedPlans, memory: int) -> int:
    """The power of two next above T / (M - W) of the plan that is best at it.

    Where that is not one of `BYTE_PRICES`, the next that is.
    """
    price, now = None, plans.smallest()
    while True:
        costs = plans.problem.accept(now)
        spent, left = weighed_time(costs), memory - costs[BYTES]
        worth = (p for p in BYTE_PRICES if (left << p if p > 0 else left >> -p) >= spent)
        last, price = price, next(worth, BYTE_PRICES[-1])
        if price == last:
            return price
        now = plans.at(price)


def _price_for_memory(plans: PricedPlans, budget: int) -> int:
    """The smallest of `BYTE_PRICES` at which the best plan is within a budget; else the last."""
    low, high = BYTE_PRICES.start, BYTE_PRICES.stop - 1
    while low < high:
        middle = (low + high) // 2
        if plans.problem.accept(plans.at(middle))[BYTES] <= budget:
            high = middle
        else:
            low = middle + 1
    return high
