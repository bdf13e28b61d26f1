"""Bucket elimination: the best assignments of a problem of two components, without search.

The tables of a variable are joined. For each choice of the other variables only its best values
stay, and the variable is gone (R. Dechter, "Bucket elimination: a unifying framework for
reasoning", Artificial Intelligence 113, 1999). What is best is a front, not one number: what is
cheapest for some weighing of the two components (`hull`), or what nothing beats in both (`pareto`),
which is all that a cap on the second can ask for (E. Rollon and J. Larrosa, "Bucket elimination for
multiobjective optimization problems", Journal of Heuristics 12, 2006).

Tables stay small on the problems of models, whose graphs are nearly chains. A variable whose table
would have more than `POINTS` points is left, and `backtracking.py` tries its values.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from shardwright.planner.solvers.problem import Problem, pick

POINTS = 20_000
"""Two tables are not joined to one of more points."""

Choices = Any
"""The values that were chosen: None, (variable, value, choices before), or a pair of choices."""
Point = tuple[int, int, Choices]
"""A cost in each component, and the choices that they are of."""
Front = list[Point]
Prune = Callable[[Front], Front]
"""Of points in ascending order, those to keep."""
Key = tuple[int, ...]
COSTS = itemgetter(0, 1)
"""Of a point."""


def pareto(points: Front) -> Front:
    """Those that no other one is as good as in both components."""
    kept = points[:1]
    for point in points:
        if point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def hull(points: Front) -> Front:
    """Those that are cheapest for some weighing of the two components."""
    kept = points[:1]
    for point in points:
        x, y, _ = point
        if y >= kept[-1][1]:
            continue
        while len(kept) > 1:
            (x0, y0, _), (x1, y1, _) = kept[-2:]
            if (x1 - x0) * (y0 - y) < (x - x0) * (y0 - y1):
                break
            kept.pop()
        kept.append(point)
    return kept


class Table(NamedTuple):
    """The rows that are allowed over variables (ascending), each with its front."""

    scope: tuple[int, ...]
    rows: dict[Key, Front]

    @property
    def points(self) -> int:
        """How many points all its fronts have."""
        return sum(map(len, self.rows.values()))

    @property
    def least(self) -> tuple[float, float]:
        """The least cost of any row in each component; infinity where there is no row."""
        points = [point for front in self.rows.values() for point in front]
        return min((p[0] for p in points), default=math.inf), min(
            (p[1] for p in points), default=math.inf
        )


def tables_of(problem: Problem) -> list[Table]:
    """The factors of a problem of two components as tables."""
    out = []
    for factor in problem.factors:
        at = sorted(range(len(factor.scope)), key=factor.scope.__getitem__)
        key = pick(at)
        rows = {key(values): [(x, y, None)] for values, (x, y) in factor.rows}
        out.append(Table(tuple(factor.scope[k] for k in at), rows))
    return out


def join(a: Table, b: Table, prune: Prune, limit: float) -> Table | None:
    """Both tables as one; None where it would have more points than `limit`."""
    scope = tuple(sorted({*a.scope, *b.scope}))
    common = [v for v in a.scope if v in b.scope]
    extra = [v for v in b.scope if v not in a.scope]
    key_a, key_b = (pick([t.scope.index(v) for v in common]) for t in (a, b))
    rest, both = pick([b.scope.index(v) for v in extra]), (*a.scope, *extra)
    merge = pick([both.index(v) for v in scope])
    matches: dict[Key, list[tuple[Key, Front]]] = {}
    for values, front in b.rows.items():
        matches.setdefault(key_b(values), []).append((rest(values), front))
    rows: dict[Key, Front] = {}
    count = 0
    for values, front in a.rows.items():
        for more, other in matches.get(key_a(values), ()):
            found = [(x + x1, y + y1, (c, c1)) for x, y, c in front for x1, y1, c1 in other]
            if len(front) > 1 < len(other):
                found = prune(sorted(found, key=COSTS))
            rows[merge(values + more)] = found
            count += len(found)
        if count > limit:
            return None
    return Table(scope, rows)


class Elimination:
    """The variables of some tables are eliminated; `left` are those that are not.

    Args:
        sizes: Of the domains of the variables.
        tables: Over these variables.
        prune: What stays of a front.
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

    def run(self, deadline: float) -> None:
        """Eliminate what can be, until `deadline` (of `time.monotonic`) has passed.

        First the variables whose table is no larger than those that it is joined of.
        """
        for limit in (0, POINTS):
            for v in self.left:
                self._push(v)
            while self._queue and time.monotonic() < deadline:
                size, v = heapq.heappop(self._queue)
                if self._queued.get(v) == size:
                    del self._queued[v]
                    self._eliminate(v, limit)

    def _push(self, v: int) -> None:
        """Have a variable visited, the smaller its table can be the sooner."""
        around = {w for i in self._of[v] for w in self.tables[i].scope}
        size = math.prod(self.sizes[w] for w in around)
        self._queued[v] = size
        heapq.heappush(self._queue, (size, v))

    def _eliminate(self, v: int, limit: int) -> None:
        """Eliminate v, or leave it until something next to it changes."""
        numbers = sorted(self._of[v], key=lambda i: (len(self.tables[i].rows), i))
        free = Table((v,), {(x,): [(0, 0, None)] for x in range(self.sizes[v])})
        table, *others = [self.tables[i] for i in numbers] or [free]
        limit = max(limit, table.points + sum(other.points for other in others))
        for other in others:
            joined = join(table, other, self.prune, limit)
            if joined is None:
                return
            table = joined
        for i in numbers:
            for w in self.tables.pop(i).scope:
                self._of[w].discard(i)
        del self.left[v]
        number = max(self.tables, default=-1) + 1
        found = self.tables[number] = without(v, table, self.prune)
        for w in found.scope:
            self._of[w].add(number)
            self._push(w)

    def front(self) -> Front:
        """The points of all tables together, where no variable is left; empty if infeasible."""
        total = Table((), {(): [(0, 0, None)]})
        for table in self.tables.values():
            total = join(total, table, self.prune, math.inf) or total
        return total.rows.get((), [])


def without(v: int, table: Table, prune: Prune) -> Table:
    """The table with the best values of v chosen."""
    at = table.scope.index(v)
    before, after = slice(at), slice(at + 1, None)
    rows: dict[Key, Front] = {}
    for values, front in table.rows.items():
        chosen = [(x, y, (v, values[at], choices)) for x, y, choices in front]
        key = values[before] + values[after]
        if key in rows:
            rows[key] += chosen
        else:
            rows[key] = chosen
    for key, front in rows.items():
        if len(front) > 1:
            rows[key] = prune(sorted(front))
    return Table(table.scope[before] + table.scope[after], rows)


def assignment(choices: Choices, count: int) -> tuple[int, ...]:
    """The values of `count` variables that choices say."""
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
