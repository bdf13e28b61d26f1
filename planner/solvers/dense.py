"""Bucket elimination on arrays: solves a small problem of one component at once, without limit.

An array has an entry for each choice of its variables; what is not allowed costs infinity. Tables
that are too large for `elimination.py`, which also keeps fronts, are still small as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardwright.planner.solvers.problem import Factor, Problem, Result

ENTRIES = 1 << 21
"""The most entries of all arrays together."""

DIMS = 64
"""Most dims of an array of NumPy. Variables with one value left take a dim, too."""


def solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
) -> Result:
    """Minimise one component of a problem without caps; "unknown" if the arrays would be large."""
    sizes = [*map(len, problem.domains)]
    steps = [*_steps([set(f.scope) for f in problem.factors], sizes)]
    entries = sum(math.prod(sizes[w] for w in scope) for scope in steps)
    dims = max(map(len, (*steps, *(f.scope for f in problem.factors))), default=0)
    if caps or entries > ENTRIES or dims > DIMS:
        return Result("unknown", None, 0)
    arrays = [(f.scope, _array(f, component, sizes)) for f in problem.factors]
    chosen = []
    for scope in steps:
        v, *rest = scope
        here = [each for each in arrays if v in each[0]]
        total = sum((_over(scope, *each) for each in here), np.zeros((), dtype=object))
        total = np.broadcast_to(total, [sizes[w] for w in scope])
        chosen.append((v, rest, total.argmin(axis=0)))
        arrays = [each for each in arrays if v not in each[0]]
        arrays.append((tuple(rest), np.asarray(total.min(axis=0), dtype=object)))
    cost = sum(array.item() for _, array in arrays)
    if cost == math.inf:
        return Result("infeasible", None, 0)
    values = [0] * len(sizes)
    for v, rest, best in reversed(chosen):
        values[v] = int(best[tuple(values[w] for w in rest)])
    return Result("optimal", tuple(values), cost)


def _steps(scopes: list[set[int]], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the variables of the array of each step; the first of them is eliminated.

    The step with the smallest array comes first.
    """
    left = {*range(len(sizes))}
    while left:
        around = {v: set[int]().union(*(s for s in scopes if v in s)) - {v} for v in left}
        v = min(left, key=lambda v: (math.prod(sizes[w] for w in (v, *around[v])), v))
        yield [v, *sorted(around[v])]
        scopes = [*(s for s in scopes if v not in s), around[v]]
        left.discard(v)


def _array(factor: Factor, component: int, sizes: Sequence[int]) -> np.ndarray:
    """Return the costs of a factor, as integers of any size."""
    out = np.full([sizes[v] for v in factor.scope], math.inf, dtype=object)
    for values, costs in factor.rows:
        out[values] = costs[component]
    return out


def _over(scope: Sequence[int], own: Sequence[int], array: np.ndarray) -> np.ndarray:
    """Return an array over the variables `own` with a dim for each variable of `scope`."""
    order = sorted(own, key=scope.index)
    there = array.transpose([own.index(v) for v in order])
    return there.reshape([there.shape[order.index(v)] if v in order else 1 for v in scope])
