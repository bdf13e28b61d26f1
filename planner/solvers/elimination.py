"""Bucket elimination: finds the best assignments of a problem of two components, without search.

To eliminate a variable, its tables are joined, and for each choice of the other variables only its
best values are kept (R. Dechter, "Bucket elimination: a unifying framework for reasoning",
Artificial Intelligence 113, 1999). The best values are a front, not one number: either the points
that are cheapest for some weighting of the two components (`hull`), or the points that no other
beats in both (`pareto`). The latter suffice for any cap on the second component (E. Rollon and
J. Larrosa, "Bucket elimination for multiobjective optimization problems", Journal of Heuristics 12,
2006).

Tables stay small on the problems of models, whose graphs are nearly chains. A variable whose table
would have more than `POINTS` points is not eliminated; `backtracking.py` tries its values.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from shardwright.planner.contract.names import grouped
from shardwright.planner.solvers.problem import Problem, pick

POINTS = 100_000
"""Tables are not joined if the result has more points than this and than they have together."""

Choices = Any
"""The chosen values: None, (variable, value, earlier choices), or a pair of choices."""
Point = tuple[int, int, Choices]
"""A cost in each component, and the choices with these costs."""
Front = list[Point]
Prune = Callable[[Front], Front]
"""Takes points in ascending order, and returns the points to keep."""
Key = tuple[int, ...]
COSTS = itemgetter(0, 1)
"""The costs of a point."""


def pareto(points: Front) -> Front:
    """Return the points that no other point equals or beats in both components."""
    kept = points[:1]
    for point in points:
        if point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def hull(points: Front) -> Front:
    """Return the points that are cheapest for some weighting of the two components."""
    kept = points[:1]
    for point in points:
        x, y, _ = point
        x1, y1, _ = kept[-1]
        if y >= y1:
            continue
        while len(kept) > 1:
            x0, y0, _ = kept[-2]
            if (x1 - x0) * (y0 - y) < (x - x0) * (y0 - y1):
                break
            kept.pop()
            x1, y1 = x0, y0
        kept.append(point)
    return kept


def summed(front: Front, other: Front) -> Front:
    """Return the hull of all sums of a point of one hull and one of another.

    A hull falls ever less steeply, and that of the sums has the edges of both in this order.
    """
    i, j, ends = 0, 0, (len(front) - 1, len(other) - 1)
    (x, y, choices), (u, v, others) = front[0], other[0]
    out = [(x + u, y + v, (choices, others))]
    while (i, j) != ends:
        turn = 1 if j == ends[1] else -1
        if i < ends[0] and j < ends[1]:
            (x1, y1, _), (u1, v1, _) = front[i + 1], other[j + 1]
            turn = (y - y1) * (u1 - u) - (v - v1) * (x1 - x)
        if turn >= 0:
            i += 1
            x, y, choices = front[i]
        if turn <= 0:
            j += 1
            u, v, others = other[j]
        out.append((x + u, y + v, (choices, others)))
    return out


class Table(NamedTuple):
    """The allowed rows over some variables (ascending), each with its front."""

    scope: tuple[int, ...]
    rows: dict[Key, Front]

    @property
    def points(self) -> int:
        """Number of points in all fronts."""
        return sum(map(len, self.rows.values()))

    @property
    def least(self) -> tuple[float, float]:
        """The least cost of any row in each component; infinity if there is no row."""
        points = [point for front in self.rows.values() for point in front]
        return min((p[0] for p in points), default=math.inf), min(
            (p[1] for p in points), default=math.inf
        )


def tables_of(problem: Problem) -> list[Table]:
    """Return the factors of a problem of two components as tables."""
    out = []
    for factor in problem.factors:
        at = sorted(range(len(factor.scope)), key=factor.scope.__getitem__)
        key = pick(at)
        rows = {key(values): [(x, y, None)] for values, (x, y) in factor.rows}
        out.append(Table(tuple(factor.scope[k] for k in at), rows))
    return out


def join(
    a: Table, b: Table, prune: Prune, limit: float = math.inf, drop: int | None = None
) -> Table | None:
    """Join two tables, and eliminate the variable `drop`, if one is given.

    Returns None if the joined table has more points than `limit`.
    """
    scope = tuple(sorted({*a.scope, *b.scope} - {drop}))
    common = [v for v in a.scope if v in b.scope]
    extra = [v for v in b.scope if v not in a.scope]
    key_a, key_b = (pick([t.scope.index(v) for v in common]) for t in (a, b))
    rest, both = pick([b.scope.index(v) for v in extra]), (*a.scope, *extra)
    merge, at = pick([both.index(v) for v in scope]), None if drop is None else both.index(drop)
    matches = grouped((key_b(values), (rest(values), front)) for values, front in b.rows.items())
    partners = [matches.get(key_a(values), ()) for values in a.rows]
    fewest = sum(map(len, partners))  # points of the joined table
    if prune is hull and fewest <= limit:  # `summed` returns as many as the longer front, or more
        fronts = zip(a.rows.values(), partners, strict=True)
        fewest = sum(max(len(front), len(other)) for front, found in fronts for _, other in found)
    if fewest > limit:
        return None
    rows: dict[Key, Front] = {}
    count = 0
    for (values, front), others in zip(a.rows.items(), partners, strict=True):
        for more, other in others:
            row = values + more
            if len(front) > 1 < len(other) and prune is hull:
                found = summed(front, other)
            else:
                found = [(x + x1, y + y1, (c, c1)) for x, y, c in front for x1, y1, c1 in other]
                if len(front) > 1 < len(other):
                    found = prune(sorted(found, key=COSTS))
            if at is not None:
                value = row[at]
                found = [(x, y, (drop, value, c)) for x, y, c in found]
            count += len(found)
            key = merge(row)
            if key in rows:
                rows[key] += found
            else:
                rows[key] = found
        if count > limit:
            return None
    if drop is not None:
        for key, front in rows.items():
            if len(front) > 1:
                rows[key] = prune(sorted(front, key=COSTS))
    return Table(scope, rows)


def cheapest(front: Front, weight: int) -> Point:
    """Return the point that is cheapest if a unit of the first component costs `weight`."""
    return min(front, key=lambda point: weight * point[0] + point[1])


class Elimination:
    """Eliminates the variables of some tables; `left` are the variables that remain.

    Args:
        sizes: Domain size of each variable.
        tables: Tables over these variables.
        prune: Selects the points of a front to keep.
    """

    def __init__(self, sizes: Mapping[int, int], tables: Sequence[Table], prune: Prune) -> None:
        self.sizes, self.prune = sizes, prune
        self.left = dict.fromkeys(sizes)
        self.tables = dict(enumerate(tables))
        self._of: dict[int, set[int]] = {v: set() for v in sizes}
        for number, table in self.tables.items():
            for v in table.scope:
                self._of[v].add(number)
        self._queued: dict[int, int] = {}
        self._queue: list[tuple[int, int]] = []

    def run(self, deadline: float, points: int = POINTS) -> None:
        """Eliminate variables while tables allow, until `deadline` (of `time.monotonic`).

        Variables whose joined table has no more points than the tables it is made of come first;
        then those whose table has at most `points`.
        """
        for limit in (0, points):
            for v in self.left:
                self._push(v)
            while self._queue and time.monotonic() < deadline:
                size, v = heapq.heappop(self._queue)
                if self._queued.get(v) == size:
                    del self._queued[v]
                    self._eliminate(v, limit)

    def weighed(self, weight: int) -> Elimination:
        """Return what is left as a problem of one component: the first costs `weight` a unit.

        Of the values of variables that are gone, the cheapest are chosen.
        """

        def one_point(front: Front) -> Front:
            x, y, choices = cheapest(front, weight)
            return [(weight * x + y, 0, choices)]

        tables = [
            Table(scope, {key: one_point(front) for key, front in rows.items()})
            for scope, rows in self.tables.values()
        ]
        return Elimination({v: self.sizes[v] for v in self.left}, tables, pareto)

    def _push(self, v: int) -> None:
        """Queue a variable by the size that its joined table may have, smallest first."""
        around = {w for i in self._of[v] for w in self.tables[i].scope}
        size = math.prod(self.sizes[w] for w in around)
        self._queued[v] = size
        heapq.heappush(self._queue, (size, v))

    def _eliminate(self, v: int, limit: int) -> None:
        """Eliminate v if its table is within the limit; else wait until a neighbour changes."""
        numbers = sorted(self._of[v], key=lambda i: (len(self.tables[i].rows), i))
        tables = [self.tables[i] for i in numbers]
        limit = max(limit, sum(table.points for table in tables))
        free = Table((v,), {(x,): [(0, 0, None)] for x in range(self.sizes[v])})
        found, *others = tables + [free] * (2 - len(tables))
        for other in others:
            joined = join(found, other, self.prune, limit, v if other is others[-1] else None)
            if joined is None:
                return
            found = joined
        for i in numbers:
            for w in self.tables.pop(i).scope:
                self._of[w].discard(i)
        del self.left[v]
        number = max(self.tables, default=-1) + 1
        self.tables[number] = found
        for w in found.scope:
            self._of[w].add(number)
            self._push(w)

    def front(self) -> Front:
        """Return the front of the problem once no variable is left; empty if infeasible."""
        total = Table((), {(): [(0, 0, None)]})
        for table in self.tables.values():
            total = join(total, table, self.prune) or total
        return total.rows.get((), [])


def assignment(choices: Choices, count: int) -> tuple[int, ...]:
    """Return the values of `count` variables from the choices of a point."""
    values, stack = [0] * count, [choices]
    while stack:
        found = stack.pop()
        if found is None:
            continue
        if len(found) == 3:
            v, values[v], found = found
            stack.append(found)
        else:
            stack += found
    return tuple(values)
