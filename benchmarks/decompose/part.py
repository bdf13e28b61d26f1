"""A few variables of a network set free, the others as they are: solved by CP-SAT.

In row form, as `solvers/cpsat.py` has it: a literal a pair of values, sums of which equal those of
values. Of the limits only those rows are left where what is free may pass what the others leave;
of rows with the same users, the fullest.

What the assignment breaks now it may break on, at a price above all costs: so the same solve
mends, and improves what is whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.decompose.network import Array, Network

PARTS = 1000
"""What is too much of a row is counted in this part of its bound."""

BITS = 60
"""CP-SAT counts to 2^63."""

SOLVING, BUILDING = 3.0, 2e-5
"""Seconds that a unit of CP-SAT's deterministic time and a literal take, about."""


class Free(NamedTuple):
    """What to solve: variables, and per variable the values that it may take."""

    variables: list[int]
    values: list[Array]


class Found(NamedTuple):
    """Values of the free variables, and whether they are proven best."""

    values: list[int]
    proven: bool
    work: float
    """Seconds that this takes, about: from counts, the same every time."""


def improve(
    network: Network,
    x: Sequence[int],
    free: Free,
    effort: float,
    deadline: float = np.inf,
    ceiling: float = np.inf,
) -> Found | None:
    """The best values of `free.variables` that CP-SAT finds at an effort; None: none in time.

    Args:
        network: The whole.
        x: An assignment; it may break tables and limits.
        free: Variables and values; those of `x` are among them.
        effort: CP-SAT's deterministic time.
        deadline: When to end, by the clock of `time.monotonic`.
        ceiling: What x costs, where it breaks nothing: what alone costs more is left out.
    """
    from ortools.sat.python import cp_model as cp

    at = {v: k for k, v in enumerate(free.variables)}
    model = cp.CpModel()
    literals = [[model.new_bool_var("") for _ in values] for values in free.values]
    terms = _Terms()
    inner: list[tuple[int, int, Array]] = []
    unary = [network.costs[v][values] for v, values in zip(*free, strict=True)]
    for v, k in at.items():
        for e, w, table in network.near[v]:
            if w not in at:
                unary[k] = unary[k] + _mended(
                    table[free.values[k], x[w]], free.values[k] == x[v], ceiling
                )
            elif e % 2 == 0:
                mine, other = free.values[k], free.values[at[w]]
                now = (mine == x[v])[:, None] & (other == x[w])[None, :]
                inner.append((k, at[w], _mended(table[np.ix_(mine, other)], now, ceiling)))
    for group, costs in zip(literals, unary, strict=True):
        model.add_exactly_one(group)
        _priced(model, terms, group, costs)
    hints = [values == x[v] for v, values in zip(*free, strict=True)]
    for group, hint in zip(literals, hints, strict=True):
        for literal, chosen in zip(group, hint.tolist(), strict=True):
            model.add_hint(literal, chosen)
    for a, b, table in inner:
        _pair(model, terms, literals[a], literals[b], table, (hints[a], hints[b]))
    excess = _limits(model, network, x, free, at, literals)
    top = 1 + terms.most
    terms.literals += excess
    terms.weights += [top] * len(excess)
    broken = terms.broken
    forbidden = top * (1 + 64 * PARTS * len(excess))
    terms.literals += broken
    terms.weights += [forbidden] * len(broken)
    shift = max(sum(terms.weights).bit_length() - BITS, 0)
    if shift:  # about what it costs: who asked knows how much it is
        terms.weights = [max(w >> shift, 1) for w in terms.weights]
    model.minimize(cp.LinearExpr.weighted_sum(terms.literals, terms.weights))
    left = deadline - time.monotonic()
    if left <= 0:
        return None
    solver = cp.CpSolver()
    parameters = solver.parameters
    parameters.max_deterministic_time = effort
    parameters.max_time_in_seconds = min(left, 3600)
    parameters.num_workers, parameters.random_seed = 1, 0
    parameters.linearization_level = 2
    parameters.symmetry_level = parameters.cp_model_probing_level = 0
    status = solver.solve(model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return None
    values = [
        int(own[next(i for i, q in enumerate(group) if solver.value(q))])
        for own, group in zip(free.values, literals, strict=True)
    ]
    work = SOLVING * solver.response_proto.deterministic_time + BUILDING * len(terms.literals)
    return Found(values, status == cp.OPTIMAL and not shift, work)


BROKEN = -np.inf
"""Stands in a table for what is forbidden but holds now."""


def _mended(table: Array, now: Array, ceiling: float) -> Array:
    """A table without what costs too much, where what is forbidden and holds now is marked."""
    table = np.where(table > ceiling, np.inf, table)
    broken = now & np.isinf(table)
    return np.where(broken, BROKEN, table) if broken.any() else table


class _Terms:
    """Literals and what they cost."""

    def __init__(self) -> None:
        self.literals: list[Any] = []
        self.weights: list[int] = []
        self.broken: list[Any] = []
        self.most = 0


def _priced(model: Any, terms: _Terms, literals: list[Any], costs: Array) -> None:
    """Give exactly one of literals its costs; what is forbidden is false."""
    costs = np.where(np.isnan(costs), np.inf, costs)  # forbidden, and broken besides
    whole = costs[np.isfinite(costs)]
    least = float(whole.min()) if whole.size else 0.0
    most = 0
    for literal, cost in zip(literals, costs.tolist(), strict=True):
        if cost == BROKEN:
            terms.broken.append(literal)
        elif cost == np.inf:
            model.add(literal == 0)
        elif cost > least:
            terms.literals.append(literal)
            terms.weights.append(int(cost - least))
            most = max(most, int(cost - least))
    terms.most += most


def _pair(
    model: Any,
    terms: _Terms,
    first: list[Any],
    second: list[Any],
    table: Array,
    hints: tuple[Array, Array],
) -> None:
    """A literal for each pair of values that may be, equal in sums to those of values."""
    rows, columns = np.nonzero(table < np.inf)
    flat = table[rows, columns]
    if not flat.any() and len(flat) == table.size:
        return
    pairs = [model.new_bool_var("") for _ in range(len(flat))]
    hinted = hints[0][rows] & hints[1][columns]
    for literal, chosen in zip(pairs, hinted.tolist(), strict=True):
        model.add_hint(literal, chosen)
    _priced(model, terms, pairs, flat)
    for side, at in ((first, rows), (second, columns)):
        held: list[list[Any]] = [[] for _ in side]
        for k, literal in zip(at.tolist(), pairs, strict=True):
            held[k].append(literal)
        for literal, group in zip(side, held, strict=True):
            model.add(sum(group) == literal)


def _limits(
    model: Any,
    network: Network,
    x: Sequence[int],
    free: Free,
    at: dict[int, int],
    literals: list[list[Any]],
) -> list[Any]:
    """Rows that what is free may pass; what they are passed by now stays possible at a price."""
    from ortools.sat.python.cp_model import LinearExpr

    limits = network.limits
    spans = [k for v in free.variables for k in limits.of.get(v, ())]
    if not spans:
        return []
    usage = limits.usage(x)
    first, last = limits.first[spans], limits.last[spans]
    own, most = np.zeros(len(usage) + 1), np.zeros(len(usage) + 1)
    taken: list[list[int]] = []
    held: list[list[Any]] = []
    for k in spans:
        v = int(limits.variable[k])
        weights = limits.weights[k][free.values[at[v]]]
        taken.append([int(w) for w in weights])
        held.append(literals[at[v]])
        for change, value in ((own, limits.weights[k][x[v]]), (most, weights.max())):
            change[limits.first[k]] += value
            change[limits.last[k]] -= value
    left = limits.bounds - (usage - np.cumsum(own)[:-1])
    tight = np.cumsum(most)[:-1] > left
    ends = np.unique([first, last])
    fullest: dict[bytes, int] = {}
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if tight[start:stop].any():
            row = start + int(left[start:stop].argmin())
            users = ((first <= row) & (row < last)).tobytes()
            if left[row] < left[fullest.setdefault(users, row)]:
                fullest[users] = row
    out: list[Any] = []
    for users, row in fullest.items():
        using = np.flatnonzero(np.frombuffer(users, dtype=bool)).tolist()
        used = [literal for k in using for literal in held[k]]
        amounts = [w for k in using for w in taken[k]]
        past = usage[row] - limits.bounds[row]
        if past > 0:
            part = max(int(limits.units[row]) // PARTS, 1)
            excess = model.new_int_var(0, int(past) // part + 1, "")
            out.append(excess)
            used.append(excess)
            amounts.append(-part)
        model.add(LinearExpr.weighted_sum(used, amounts) <= int(left[row]))
    return out
