"""From a network to the best plan: what a byte costs, and who proves that nothing is better.

For least time the price of a byte is what its room for more sequences is worth. For least memory
it is the smallest at which the plan needs no more than the least possible bytes plus a slack; a
user's own budget is a hard cap then, below which bytes are nearly free. What does not hang on the
price is eliminated first, once. The price is found with the backtracking solver (`warm_start.py`,
`byte_price.py`); then the solver that was asked for proves its answer, or finds a better
(`proof.py`), on the whole problem.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner.contract.plan_figures import ObjectiveName
from shardwright.planner.problem.byte_price import price_for_memory, price_for_time
from shardwright.planner.problem.objective import BYTE_PRICES, Digits, primary
from shardwright.planner.problem.proof import prove
from shardwright.planner.problem.warm_start import WarmStart
from shardwright.planner.solvers import backtracking
from shardwright.planner.solvers.bucket_elimination import eliminate
from shardwright.planner.solvers.presolve import Presolved
from shardwright.planner.solvers.problem import CostVector, Solver
from shardwright.planner.solvers.reduction import chain

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
    proven: Callable[[], bool]
    """Whether the solver that was asked proved that; else backtracking did, or nobody.

    Where backtracking did, the other is at work when this is first asked for: so it may be beside
    something else.
    """
    better: bool
    """Whether that solver found it, and not backtracking before."""
    caps: Mapping[int, int]
    """Of the priced problem (`objective.question`): its component 1 is the bytes."""


def optimize(
    small: Presolved,
    solve: Solver | None,
    seconds: float,
    memory: int | None = None,
    backup: Solver | None = None,
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
        backup: The solver where none was asked for; without it, backtracking.
        movable: Bytes that the slack is a share of (`CostFunctionNetwork.movable`).
        objective: What is to be least, as `byte_price.py` says.

    Raises:
        OverBudget: nothing fits; the message says the least that would.
        SolverError: the time ran out before any plan was found, or the solver's answer breaks a
            factor or a cap. So does `proven` of what is given, and where that answer is better than
            what backtracking proved the best.
    """
    start = time.monotonic()
    prover = solve or backup or backtracking.solve
    alone = prover is backtracking.solve
    soft = objective == "time" or memory is None
    share = 1 if alone else SHARE if soft else CAPPED
    caps = {} if memory is None else {1: memory}

    digits = Digits.of(small.problem)
    left = chain(small.problem, digits.split, eliminate)
    warm_start = WarmStart(left.problem, digits, {} if soft else caps, start + seconds * share)
    least = warm_start.least()
    if least is None:
        raise SolverError(
            f"no plan found within the time limit of {seconds:g} s: raise --time-limit"
        )
    floor = left.problem.accept(least)[0]
    if memory is not None and floor > memory:
        raise OverBudget(memory, floor, small.expand(left.expand(least)))
    if objective == "time" and memory is not None:
        price, found = price_for_time(warm_start, least, memory)
        if price == BYTE_PRICES[-1]:  # a higher one may be due: so the cap is said, too
            warm_start = replace(warm_start, caps=caps)
            found = warm_start.best(price, least)
    else:
        budget = floor + int(SLACK * movable) if memory is None else None
        price, found = price_for_memory(warm_start, least, budget)
    found = found._replace(assignment=left.expand(found.assignment or ()))

    whole = replace(warm_start, problem=left.parts[0].problem)
    rest = start + seconds - time.monotonic()
    proof = cache(partial(prove, whole, price, found, prover, rest))
    best, better = found, False
    if not alone and found.status != "optimal":
        best, better = proof().result, proof().better
    assignment = best.assignment or ()
    costs = small.problem.accept(assignment)
    value = primary(costs, price)
    bound = min(digits.first(best.bound, price), value)
    optimal = best.status == "optimal"
    return Optimum(
        small.expand(assignment), costs, price, value, bound, optimal,
        proven=lambda: not alone and proof().proven, better=better, caps=warm_start.caps,
    )  # fmt: skip
