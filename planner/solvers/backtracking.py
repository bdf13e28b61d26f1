"""Branch and bound in pure Python: used when OR-tools is absent, and to check it.

What elimination leaves is searched: bounds come from `buckets.py`, weighed sums of the costs from
`multipliers.py`, the search is in `depth_first.py`; here they are put together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from shardwright.planner.solvers import buckets
from shardwright.planner.solvers.bucket_elimination import Eliminated, eliminate
from shardwright.planner.solvers.depth_first import DepthFirst
from shardwright.planner.solvers.incumbent import Incumbent
from shardwright.planner.solvers.multipliers import Weights, dot, multipliers, unit
from shardwright.planner.solvers.problem import Problem, Result
from shardwright.planner.solvers.tables import Vector

STEPS = 64
"""The first goal is this part of the gap above the bound."""
SHARE = 0.5
"""Share of the time that may go into bounds."""


def solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
) -> Result:
    """Minimise one component of `problem` under `caps`."""
    start = time.monotonic()
    middle, end = start + SHARE * seconds, start + seconds
    small = eliminate(problem.only([component, *caps]), buckets.ROWS, middle)
    return search(small, list(caps.values()), hint, middle, end)


def search(
    small: Eliminated,
    limits: list[int],
    hint: Sequence[int] | None,
    middle: float,
    end: float,
) -> Result:
    """Minimise the first component of what elimination left, under `limits` on the others.

    Bounds take until `middle`, the search ends at `end`, of `time.monotonic`.
    """
    first = None if hint is None else small.contract(hint)
    result = _search(small.problem, limits, first, middle, end)
    if result.assignment is None:
        return result
    return result._replace(assignment=small.expand(result.assignment))


def _search(
    problem: Problem, limits: list[int], hint: Sequence[int] | None, middle: float, end: float
) -> Result:
    """Minimise the first component; bounds take until `middle`, the search ends at `end`."""
    incumbent = Incumbent(problem, limits)
    if hint is not None:
        incumbent.offer(tuple(hint))
    order = buckets.elimination_order(problem)
    weights = _weights(problem, order, incumbent, middle)
    found = buckets.bound(problem, order, weights, middle)
    if found is None:
        return Result("infeasible", None, 0)
    bound = max(
        -((dot(w[1:], limits) - root) // w[0])
        for w, root in zip(weights, found.root, strict=True)
        if w[0]
    )
    search = DepthFirst(found, weights, incumbent, hint)
    if incumbent.assignment is None:
        proven = search.run(None, end)
        if incumbent.assignment is None:
            return Result("infeasible", None, 0) if proven else Result("unknown", None, bound)
        bound = incumbent.cost if proven else bound
    # In rounds: a goal near the bound first, as few vectors of costs stay within it; when nothing
    # reaches the goal that is a better bound.
    step = max(1, (incumbent.cost - bound) // STEPS)
    while bound < incumbent.cost:
        goal = min(bound + step, incumbent.cost) - 1
        if not search.run(goal, end):
            return Result("feasible", incumbent.assignment, bound)
        bound, step = min(goal + 1, incumbent.cost), 2 * step
    return Result("optimal", incumbent.assignment, incumbent.cost)


def _weights(
    problem: Problem, order: list[int], incumbent: Incumbent, deadline: float
) -> list[Weights]:
    """What the search bounds: the objective, each capped cost, and weighed sums of them."""
    n = len(problem.components)
    spans = [
        sum(
            max(r.costs[c] for r in f.rows) - min(r.costs[c] for r in f.rows)
            for f in problem.factors
            if f.rows
        )
        for c in range(n)
    ]
    known: dict[Weights, Vector | None] = {}

    def evaluate(weights: Weights) -> Vector | None:
        if weights not in known and time.monotonic() < deadline:
            bounds = buckets.bound(problem, order, [weights], deadline)
            found = bounds and buckets.descend(bounds)
            known[weights] = incumbent.offer(found) if found else None
        return known.get(weights)

    limits = [(i + 1, cap) for i, cap in enumerate(incumbent.caps)]
    out = [unit(n, i) for i in range(n)]
    for target, cap in [*((i, limits[: i - 1]) for i in range(2, n)), (0, limits)]:
        out += multipliers(target, cap, spans, evaluate)
    return list(dict.fromkeys(out))
