"""Branch and bound in pure Python: used when OR-tools is absent, and to check it.

Bounds come from `buckets.py`, weighed sums of the costs from `multipliers.py`, the search is in
`search.py`; here they are put together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from shardwright.planner.problem import Problem, Result
from shardwright.planner.solvers.buckets import Vector, descend, eliminate, elimination_order
from shardwright.planner.solvers.multipliers import Weights, dot, multipliers, unit
from shardwright.planner.solvers.search import Incumbent, Search

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
    targets = [component, *caps]
    limits = list(caps.values())
    incumbent = Incumbent(problem, targets, limits)
    if hint is not None:
        incumbent.offer(tuple(hint))
    order = elimination_order(problem)
    middle = start + SHARE * seconds
    weights = _weights(problem, order, incumbent, middle)
    buckets = eliminate(problem, order, [_spread(problem, targets, w) for w in weights], middle)
    if buckets is None:
        return Result("infeasible", None, 0)
    bound = max(
        -((dot(w[1:], limits) - root) // w[0])
        for w, root in zip(weights, buckets.root, strict=True)
        if w[0]
    )
    search = Search(buckets, weights, incumbent, hint)
    if incumbent.assignment is None:
        proven = search.run(None, start + seconds)
        if incumbent.assignment is None:
            return Result("infeasible", None, 0) if proven else Result("unknown", None, bound)
        bound = incumbent.cost if proven else bound
    # In rounds: a goal near the bound first, as few vectors of costs stay within it; when nothing
    # reaches the goal that is a better bound.
    step = max(1, (incumbent.cost - bound) // STEPS)
    while bound < incumbent.cost:
        goal = min(bound + step, incumbent.cost) - 1
        if not search.run(goal, start + seconds):
            return Result("feasible", incumbent.assignment, bound)
        bound, step = min(goal + 1, incumbent.cost), 2 * step
    return Result("optimal", incumbent.assignment, incumbent.cost)


def _spread(problem: Problem, targets: Sequence[int], weights: Weights) -> Vector:
    """Weights over the targets as weights over all components of the problem."""
    out = [0] * len(problem.components)
    for t, w in zip(targets, weights, strict=True):
        out[t] += w
    return tuple(out)


def _weights(
    problem: Problem, order: list[int], incumbent: Incumbent, deadline: float
) -> list[Weights]:
    """What the search bounds: the objective, each capped cost, and weighed sums of them."""
    targets, n = incumbent.targets, len(incumbent.targets)
    spans = [
        sum(
            max(r.costs[t] for r in f.rows) - min(r.costs[t] for r in f.rows)
            for f in problem.factors
            if f.rows
        )
        for t in targets
    ]
    known: dict[Weights, Vector | None] = {}

    def evaluate(weights: Weights) -> Vector | None:
        if weights not in known and time.monotonic() < deadline:
            buckets = eliminate(problem, order, [_spread(problem, targets, weights)], deadline)
            found = buckets and descend(buckets)
            known[weights] = incumbent.offer(found) if found else None
        return known.get(weights)

    limits = [(i + 1, cap) for i, cap in enumerate(incumbent.caps)]
    out = [unit(n, i) for i in range(n)]
    for target, cap in [*((i, limits[: i - 1]) for i in range(2, n)), (0, limits)]:
        out += multipliers(target, cap, spans, evaluate)
    return list(dict.fromkeys(out))
