"""Optimises a network: sets the price of a byte, finds the best plan, and has it proven.

Least memory: the price is the lowest at which the best plan holds few enough bytes: the least
possible plus a slack. A user's own budget is a hard cap, below which bytes are nearly free.

Least time minimises T / (M - W). T is the time of the plan, W the bytes that a rank holds, M the
bytes that it may hold. The rest, M - W, holds the KV cache and activations of more sequences. The
throughput grows with (M - W) / T. At the plan where T / (M - W) is least, one byte more is worth
exactly that fraction of the time. The plan and the price depend on each other. The iteration starts
at the plan of fewest bytes; each step takes the plan that is best at the price of the last, and
lowers the fraction until it stays (Dinkelbach, "On nonlinear fractional programming", Management
Science 13(7), 1967). The price is never below that fraction, so each of these plans is within M,
and no solver needs a cap. Prices are powers of two: few steps are needed, and plans do not depend
on the last digit of a size.

Elimination finds the best plans at all prices at once (`solvers/elimination.py`). Then the
requested solver proves the plan, or finds a better one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from shardwright.planner.solvers import backtracking, dense
from shardwright.planner.solvers.elimination import (
    Elimination,
    Front,
    assignment,
    cheapest,
    hull,
    tables_of,
)
from shardwright.planner.solvers.presolve import Presolved
from shardwright.planner.solvers.problem import CostVector, Problem, Result, Solver
from shardwright.planner.solvers.residual import solve_residual

SLACK = 0.05
SHARE_FOR_PRICE = 0.7
"""Share of the time limit for finding the price of a byte."""
CAPPED = 0.05
"""Share of the time limit for backtracking under a budget, before another solver runs."""
SHARE_TO_PROVE_AGAIN = 0.1
"""Share of the time limit for proving a plan that is proven already with the requested solver."""
FRONTS = 10_000
"""The most points of a table of fronts. What is left with this limit is solved for each price."""


class OverBudget(InfeasibleError):
    """No plan holds as few bytes as the budget."""

    def __init__(self, memory: int, floor: int, assignment: tuple[int, ...]) -> None:
        super().__init__(
            f"no plan fits {memory:,} bytes a rank: the least that would fit is {floor:,} bytes"
        )
        self.floor = floor
        """The fewest bytes that any plan holds."""
        self.assignment = assignment
        """A plan with `floor` bytes."""


class OutOfTime(SolverError):
    """No plan was found within the time limit."""


class Proof(NamedTuple):
    """The best known plan, and what the requested solver did with it."""

    result: Result
    proven: bool
    """Whether the requested solver proved the plan."""
    better: bool
    """Whether the requested solver found a cheaper plan than it was given."""


@dataclass(frozen=True)
class Optimum:
    """The best assignment found, its costs, and how far and by which solver it is proven."""

    assignment: tuple[int, ...]
    costs: CostVector
    byte_price: int
    """The price of a byte as a power of two: one of `objective.BYTE_PRICES`."""
    objective: int
    """Time and priced bytes: `objective.primary` of the costs."""
    bound: int
    """No plan has a lower objective."""
    optimal: bool
    proven: Callable[[], bool]
    """Returns whether the requested solver proved the assignment.

    If elimination or backtracking already proved it, the requested solver runs only at the first
    call. The call can then run in parallel with other work.
    """
    better: bool
    """Whether the requested solver found the assignment, not elimination or backtracking."""
    caps: Mapping[int, int]
    """Caps on components of `objective.question`, whose component 1 is the bytes."""


@dataclass
class PricedPlans:
    """Finds the best plan of a network's problem at each price of a byte.

    Elimination finds all of them at once. Where its tables of fronts would be too large, what is
    left is solved for each price: on arrays, or by the solver if these would be too large, too.
    """

    problem: Problem
    digits: Digits
    solver: Solver
    deadline: float
    """In the time of `time.monotonic`."""

    @classmethod
    def of(cls, problem: Problem, solver: Solver, seconds: float) -> PricedPlans:
        """Return the plans of a network's problem; `seconds` is the limit of `optimize`."""
        return cls(
            problem, Digits.of(problem), solver, time.monotonic() + SHARE_FOR_PRICE * seconds
        )

    def __post_init__(self) -> None:
        self._two = self.digits.bytes_and_rest(self.problem)
        sizes = {v: len(domain) for v, domain in enumerate(self.problem.domains)}
        self._work = Elimination(sizes, tables_of(self._two), hull)
        now = time.monotonic()
        self._work.run(now + (self.deadline - now) / 3, FRONTS)
        self._points = [] if self._work.left else self._work.front()
        self._found: dict[int, Result] = {}

    def smallest(self) -> tuple[int, ...]:
        """Return the best of the plans with the fewest bytes."""
        return self._best(1 + self._two.most(1))[1]

    def at(self, price: int) -> tuple[int, ...]:
        """Return the best plan if a byte costs 2**price."""
        return self._best(self.digits.byte_weight(price))[1]

    def proven_at(self, price: int) -> bool:
        """Whether the plan at a price is proven to be the best."""
        return self._best(self.digits.byte_weight(price))[0].status == "optimal"

    def within(self, memory: int, price: int) -> tuple[int, ...]:
        """Return the best known plan at a price that holds at most `memory` bytes."""
        points = [p for p in self._points if p[0] <= memory]
        return self._cheapest(points, self.digits.byte_weight(price)) or self.smallest()

    def _cheapest(self, points: Front, weight: int) -> tuple[int, ...] | None:
        """Return the plan of the cheapest point if a byte costs `weight`; None without points."""
        if not points:
            return None
        return assignment(cheapest(points, weight)[2], len(self.problem.domains))

    def _best(self, weight: int) -> tuple[Result, tuple[int, ...]]:
        """Return the best plan if a byte costs `weight` units of the other component.

        Raises:
            OutOfTime: the solver found no plan in time.
        """
        if weight not in self._found:
            best = self._cheapest(self._points, weight)
            found = Result("optimal", best, 0) if best is not None else self._asked(weight)
            self._found[weight] = found
        result = self._found[weight]
        if result.assignment is None:
            raise OutOfTime("no plan found within the time limit: raise --time-limit")
        return result, result.assignment

    def _asked(self, weight: int) -> Result:
        """Solve what elimination left, for one weight."""
        count, left = len(self.problem.domains), self._work.weighed(weight)
        for solver in (dense.solve, self.solver):
            found = solve_residual(left, count, solver, self._seconds / 3)
            if found.status != "unknown":
                return found
        known = [r.assignment for r in self._found.values() if r.assignment is not None]
        priced = [(weight * x + y, a) for a in known for x, y in [self._two.accept(a)]]
        return Result("feasible", min(priced)[1], found.bound) if priced else found

    @property
    def _seconds(self) -> float:
        """The time that is left."""
        return max(self.deadline - time.monotonic(), 0.2)


def optimize(
    small: Presolved,
    solve: Solver,
    seconds: float,
    memory: int | None = None,
    *,
    movable: int,
    objective: ObjectiveName = "memory",
    plans: PricedPlans | None = None,
) -> Optimum:
    """Return the cheapest assignment of a network of `planner/problem/builder.py`.

    Args:
        small: The network, presolved.
        solve: The requested solver.
        seconds: Time limit for all calls of solvers together.
        memory: Bytes that a rank may hold. Required for least time.
        movable: Bytes that the slack is a share of (`CostFunctionNetwork.movable`).
        objective: What is minimised.
        plans: The plans of the network, if another cap was tried before.

    Raises:
        OverBudget: nothing fits; the message has the least that would.
        SolverError: the time ran out before any plan was found, or the solver's answer breaks a
            factor or a cap. `Optimum.proven` raises it too, also if the solver's answer is better
            than what was proven to be the best.
    """
    end = time.monotonic() + seconds
    problem, alone = small.problem, solve is backtracking.solve
    plans = plans or PricedPlans.of(problem, solve, seconds)
    least = plans.smallest()
    floor = problem.accept(least)[BYTES]
    if memory is not None and floor > memory:
        raise OverBudget(memory, floor, small.expand(least))
    if objective == "time" and memory is not None:
        price = _price_for_time(plans, memory)
        capped = price == BYTE_PRICES[-1]  # the right price may be higher, so a cap is needed
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
        left = end - time.monotonic()
        most = SHARE_TO_PROVE_AGAIN * seconds if found.status == "optimal" else seconds
        return prove(asked(), caps, found, solve, max(min(left, most), 0.05))

    if caps:
        hint = plans.within(caps[1], price)
        share = 1 if alone else CAPPED
        found = backtracking.solve(asked(), 0, caps, hint, share * (end - time.monotonic()))
    else:
        best = plans.at(price)
        found = Result("optimal" if plans.proven_at(price) else "feasible", best, 0)

    result, better = found, False
    if found.status != "optimal" and not (alone and caps):
        result, better = proof().result, proof().better
    chosen = result.assignment or ()
    costs = problem.accept(chosen)
    value, optimal = primary(costs, price), result.status == "optimal"
    bound = value if optimal else min(result.bound // plans.digits.below, value)
    return Optimum(
        small.expand(chosen), costs, price, value, bound, optimal,
        lambda: not alone and proof().proven, better, caps,
    )  # fmt: skip


def prove(
    asked: Problem, caps: Mapping[int, int], found: Result, solver: Solver, seconds: float
) -> Proof:
    """Return the cheaper of the known plan and the solver's answer, with the higher bound.

    Args:
        asked: The problem to minimise (`objective.question`).
        caps: Caps on other components.
        found: The best known plan, which is the solver's hint.
        solver: The solver.
        seconds: Time limit of the solver.

    Raises:
        SolverError: the solver's answer breaks a factor or a cap, or is cheaper than a known plan
            that was proven optimal.
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
    """Return the price p for which 2**p is next above T / (M - W) of the best plan at p.

    The result is clamped to `BYTE_PRICES`.
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
    """Return the least of `BYTE_PRICES` whose best plan is within a budget; else the last."""
    low, high = BYTE_PRICES.start, BYTE_PRICES.stop - 1
    while low < high:
        middle = (low + high) // 2
        if plans.problem.accept(plans.at(middle))[BYTES] <= budget:
            high = middle
        else:
            low = middle + 1
    return high
