"""From a network to the best plan: how bytes and time are traded, and what breaks ties.

Left to itself the fastest plan on a fast link replicates everything. So a byte gets a price: the
smallest power of two at which the plan needs no more than the least possible bytes plus a slack.
With a price instead of a hard cap equal layers come out alike (a cap makes a knapsack of them),
and the linear relaxation stays integral: optimality is proven at the root. A user's own budget is a
hard cap on top. Ties are broken in the same objective by lower digits, not by a second solve under
a cap on the first one: measured on 2 layers of a dense decoder, 0.2 s against more than 30 s.

The price is searched with the backtracking solver, whose bucket elimination is exact and takes a
few hundredths of a second on these networks; another solver that was asked for starts from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner.network import ACTIONS, BACKWARD, BYTES, TIE, TIME
from shardwright.planner.problem import Costs, Problem, Result, Row, Solver
from shardwright.planner.simplify import Simplified
from shardwright.planner.solvers.backtracking import solve as scout

SLACK = 0.05
FORWARD_WEIGHT = 16
"""A nanosecond of the forward pass counts as much as this many of the backward pass."""
POWERS = range(-16, 24)
"""A byte costs 2**power / FORWARD_WEIGHT nanoseconds."""
LIMIT = 2**60
"""Largest objective that solvers with 64-bit integers can take."""


@dataclass(frozen=True)
class Optimum:
    """The best assignment found, its costs, how far it is proven, and by whom."""

    assignment: tuple[int, ...]
    costs: Costs
    power: int
    objective: int
    bound: int
    optimal: bool
    scouted: bool
    """Whether it is the scout's answer, the other solver having proven nothing better."""


def primary(power: int) -> Callable[[Costs], int]:
    """Time plus priced bytes, of the costs of a row."""

    def value(costs: Costs) -> int:
        size = costs[BYTES] << power if power >= 0 else costs[BYTES] >> -power
        return FORWARD_WEIGHT * costs[TIME] + costs[BACKWARD] + size

    return value


def weighed(problem: Problem, functions: Sequence[Callable[[Costs], int]]) -> Problem:
    """The same problem with one component for each function of a row's costs."""
    out = Problem(tuple(f"w{i}" for i in range(len(functions))), problem.names, problem.domains)
    for f in problem.factors:
        out.factor(
            f.name, f.scope, [Row(r.values, tuple(g(r.costs) for g in functions)) for r in f.rows]
        )
    return out


def with_ties(problem: Problem, power: int) -> Callable[[Costs], int]:
    """The primary objective, with changes of placement and the name tie in lower digits."""

    def most(value: Callable[[Costs], int]) -> int:
        return 1 + sum(max((value(r.costs) for r in f.rows), default=0) for f in problem.factors)

    base = primary(power)
    room = LIMIT // most(base)
    actions = most(lambda c: c[ACTIONS])
    names = min(most(lambda c: c[TIE]), max(room // actions, 1))
    if actions > room:
        return base
    keep = names == most(lambda c: c[TIE])
    return lambda c: (base(c) * actions + c[ACTIONS]) * names + (c[TIE] if keep else 0)


def optimize(
    small: Simplified,
    solve: Solver | None,
    seconds: float,
    memory: int | None = None,
    backup: Solver | None = None,
) -> Optimum:
    """The cheapest assignment of a network of `planner/network.py`.

    Args:
        small: The network, simplified.
        solve: The solver that was asked for; None for the scout, which proves nearly all.
        seconds: Time limit for all of its calls together.
        memory: Budget in bytes a rank, if the user set one.
        backup: The solver for what the scout cannot prove, where none was asked for.

    Raises:
        InfeasibleError: nothing fits; the message says the least that would.
        SolverError: the time ran out before any plan was found.
    """
    deadline = time.monotonic() + seconds

    def run(
        p: Problem, caps: Mapping[int, int], hint: Sequence[int] | None, by: Solver = scout
    ) -> Result:
        result = by(p, 0, caps, hint, max(deadline - time.monotonic(), 0.05))
        if result.assignment is None and hint is None:
            raise SolverError(
                f"no plan found within the time limit of {seconds:g} s: raise --time-limit"
            )
        return result

    def size(assignment: Sequence[int] | None) -> int:
        costs = small.problem.price(assignment or ())
        assert costs is not None, "a solver returned an assignment that a factor forbids"
        return costs[BYTES]

    least = run(weighed(small.problem, [lambda c: c[BYTES]]), {}, None)
    floor = size(least.assignment)
    if memory is not None and floor > memory:
        raise InfeasibleError(
            f"no plan fits {memory:,} bytes a rank: the least that would fit is {floor:,} bytes"
        )
    budget = memory
    if budget is None:
        budget = floor + int(SLACK * _movable(small.problem, least.assignment or ()))
    low, high, best = POWERS.start, POWERS.stop - 1, least.assignment
    while low < high:  # the smallest price that keeps to the budget
        middle = (low + high) // 2
        trial = run(weighed(small.problem, [primary(middle)]), {}, best)
        if size(trial.assignment or best) <= budget:
            high, best = middle, trial.assignment or best
        else:
            low = middle + 1
    return _finish(small, run, solve, backup, low, memory, best or ())


def _better(
    final: Problem, best: Sequence[int], other: Sequence[int], caps: Mapping[int, int]
) -> Sequence[int]:
    """The cheaper of two assignments; the other comes from a solver that anyone may have made.

    Raises:
        SolverError: it breaks a factor or a cap.
    """
    have, found = final.price(best), final.price(other)
    if found is None or any(found[c] > cap for c, cap in caps.items()):
        raise SolverError("the solver returned an assignment that its problem forbids")
    return best if have is not None and have <= found else other


def _movable(problem: Problem, least: Sequence[int]) -> int:
    """Bytes, in the least assignment, of what could also be stored otherwise.

    The slack is a share of these: the bytes of what no plan can split excuse nothing.
    """
    total = 0
    for factor in problem.factors:
        if len({r.costs[BYTES] for r in factor.rows}) > 1:
            values = tuple(least[v] for v in factor.scope)
            total += next(r.costs[BYTES] for r in factor.rows if r.values == values)
    return total


def _finish(
    small: Simplified,
    run: Callable[..., Result],
    solve: Solver | None,
    backup: Solver | None,
    power: int,
    memory: int | None,
    hint: Sequence[int],
) -> Optimum:
    """Solve once more with tie-breaks, and under the user's budget if there is one.

    The asked solver starts from the scout's answer; if its time runs out, the scout's bound holds.
    """
    if memory is not None:
        power = POWERS.start  # bytes within the budget are free
    final = weighed(small.problem, [with_ties(small.problem, power), lambda c: c[BYTES]])
    caps = {} if memory is None else {1: memory}
    first = run(final, caps, hint)
    best, bound, optimal = first.assignment or tuple(hint), first.bound, first.status == "optimal"
    by = scout if solve is None and (optimal or backup is None) else solve or backup or scout
    if by is not scout:
        second = run(final, caps, best, by)
        bound, optimal = max(bound, second.bound), optimal or second.status == "optimal"
        by = by if second.status == "optimal" else scout
        if second.assignment is not None:
            best = _better(final, best, second.assignment, caps)
    costs, objective = small.problem.price(best), final.price(best)
    assert costs is not None and objective is not None
    bound = min(bound, objective[0])
    return Optimum(small.expand(best), costs, power, objective[0], bound, optimal, by is scout)
