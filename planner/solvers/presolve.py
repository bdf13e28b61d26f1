"""Reduces a problem before any solver sees it: prune, merge, join.

Values without support are removed (arc consistency), variables that determine each other become one
(in a dense layer nearly all do), and factors over the same variables become one. The reduced
problem has the same solutions and costs; `Presolved.expand` maps its assignments back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, compress
from operator import add, contains, itemgetter
from typing import Any

from shardwright.planner.contract.names import grouped
from shardwright.planner.solvers.problem import CostVector, Factor, Part, Problem, Row, pick, row_of

VALUES = itemgetter(0)
"""The values of a `Row`."""


@dataclass(frozen=True)
class Presolved:
    """A reduced problem, and how each variable of the old problem follows from it."""

    problem: Problem
    source: list[tuple[int, dict[int, int]]]
    """For each old variable, a variable of the reduced problem, and its value -> the old value."""

    def expand(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """Return the assignment of the old problem for one of the reduced problem."""
        return tuple(values[assignment[v]] for v, values in self.source)

    def factor(self, old: Factor) -> Factor:
        """Return a factor of the old problem as a factor of the reduced problem."""
        places = [self.source[v] for v in old.scope]
        back = [{own: new for new, own in values.items()} for _, values in places]
        rows = [
            Row(tuple(b[x] for b, x in zip(back, row.values, strict=True)), row.costs)
            for row in old.rows
            if all(map(contains, back, row.values))
        ]
        out = self.problem.without_factors(self.problem.components)
        out.factor(old.name, [v for v, _ in places], rows)
        return out.factors[0]


def presolve(problem: Problem) -> Presolved | None:
    """Return the reduced problem; None if a variable has no value left, so it is infeasible."""
    reduction = _Reduction(problem)
    while True:
        if not reduction.prune():
            return None
        merged, count = reduction.merge(), len(reduction.factors)
        reduction.join()
        # A join removes rows too: values may have lost their support.
        if not merged and len(reduction.factors) == count:
            return reduction.rebuilt()


def narrowed(small: Presolved, factors: Iterable[Factor]) -> Presolved | None:
    """Add factors over variables of the old problem to a presolved problem, and presolve again.

    Returns:
        The reduced problem; None if it is infeasible. This is fast: the problem is small already.
    """
    more = [small.factor(f) for f in factors]
    if not more:
        return small
    again = presolve(replace(small.problem, factors=[*small.problem.factors, *more]))
    if again is None:
        return None
    back = [
        (again.source[v][0], {new: own[x] for new, x in again.source[v][1].items()})
        for v, own in small.source
    ]
    return Presolved(again.problem, back)


def _one_a_scope(factors: Iterable[Factor]) -> list[Factor]:
    """Join factors of equal scope. Most are prices and demands of one variable."""
    out: dict[tuple[int, ...], Factor] = {}
    for factor in factors:
        host = out.get(factor.scope)
        if host is None:
            out[factor.scope] = Factor(factor.name, factor.scope, factor.rows)
        else:
            host.rows = _joined(host, factor)
    return [*out.values()]


def prune(
    domains: list[set[int]],
    factors: Sequence[Factor],
    touching: Mapping[int, Sequence[int]],
    changed: Iterable[int],
) -> bool:
    """Remove rows and values without support until nothing changes; False if infeasible.

    Args:
        domains: The values left of each variable. A domain that shrinks is replaced.
        factors: The factors. The rows of a factor that loses some are replaced.
        touching: Variable -> the numbers of the factors over it.
        changed: The numbers of the factors to begin with.
    """
    queue = deque(changed)
    waiting = set(queue)
    while queue:
        i = queue.popleft()
        waiting.discard(i)
        factor = factors[i]
        inside = [domains[v] for v in factor.scope]
        supported = [*map(set, _columns(factor))]
        if not all(map(set.issubset, supported, inside)):
            factor.rows = [r for r in factor.rows if all(map(contains, inside, r.values))]
            supported = [*map(set, _columns(factor))]
        if not factor.rows:
            return False
        for v, found in zip(factor.scope, supported, strict=True):
            if len(found) < len(domains[v]):
                domains[v] = found
                for j in touching[v]:
                    if j not in waiting:
                        waiting.add(j)
                        queue.append(j)
    return True


def _columns(factor: Factor) -> list[tuple[int, ...]]:
    """Return for each variable of a factor its value in each row."""
    return [*zip(*map(VALUES, factor.rows), strict=True)] or [()] * len(factor.scope)


def _join(factors: list[Factor]) -> list[Factor]:
    """Join every factor into one whose variables include its own."""
    out: list[Factor] = []
    by_variable: dict[int, list[Factor]] = {}
    guests: dict[int, list[Factor]] = {}
    for factor in sorted(factors, key=lambda f: -len(f.scope)):
        hosts = by_variable.get(factor.scope[0], ()) if factor.scope else ()
        host = next((h for h in hosts if set(factor.scope) <= set(h.scope)), None)
        if host is not None:
            guests.setdefault(id(host), []).append(factor)
            continue
        out.append(factor)
        for v in factor.scope:
            by_variable.setdefault(v, []).append(factor)
    for host in out:
        for factor in guests.get(id(host), ()):
            host.rows = _joined(host, factor)
    return out


def _joined(host: Factor, factor: Factor) -> list[Row]:
    """Return the rows of `host` that `factor`, over a subset of its scope, allows; costs added."""
    at = [host.scope.index(v) for v in factor.scope]
    table: dict[Any, CostVector] = dict(factor.rows)
    if len(at) == 1:
        table = {x: costs for (x,), costs in factor.rows}
    keys = map(itemgetter(*at) if at else pick(at), map(VALUES, host.rows))
    if not any(map(any, table.values())):
        return [*compress(host.rows, map(table.__contains__, keys))]
    found = zip(host.rows, map(table.get, keys), strict=True)
    return [
        row_of((row[0], tuple(map(add, row[1], more)))) if any(more) else row
        for row, more in found
        if more is not None
    ]


class _Reduction:
    """A problem while it is reduced. Variables keep their numbers until `rebuilt`.

    Attributes:
        domains: The values left of each variable.
        factors: Factors over variables that stand for themselves.
        parent: The variable that stands for each variable.
        maps: For each variable: value of its parent -> its own value.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.domains = [set(d) for d in problem.domains]
        self.factors = _join(_one_a_scope(problem.factors))
        self.parent = list(range(len(self.domains)))
        self.maps = [{v: v for v in d} for d in self.domains]

    def prune(self) -> bool:
        """Remove rows and values without support; False if a variable has none left."""
        factors = self.factors
        touching = grouped((v, i) for i, factor in enumerate(factors) for v in factor.scope)
        return all(self.domains) and prune(self.domains, factors, touching, range(len(factors)))

    def join(self) -> None:
        """Join every factor into one whose variables include its own."""
        self.factors = _join(self.factors)

    def merge(self) -> bool:
        """Replace variables that follow one to one from another; return whether there were any."""
        replaced = self._replaceable()
        for v, before in enumerate(self.parent):
            if before in replaced:
                keep, forward = replaced[before]
                own = self.maps[v]
                self.maps[v] = {new: own[old] for new, old in forward.items() if old in own}
                self.parent[v] = keep
        inverse = {drop: {old: new for new, old in f.items()} for drop, (_, f) in replaced.items()}
        for factor in self.factors:
            if not any(v in replaced for v in factor.scope):
                continue
            scope = tuple(replaced[v][0] if v in replaced else v for v in factor.scope)
            unique = tuple(dict.fromkeys(scope))
            take, first = pick([scope.index(v) for v in unique]), pick([*map(scope.index, scope)])
            columns = [
                map(inverse[v].get, column) if v in inverse else column
                for v, column in zip(factor.scope, _columns(factor), strict=True)
            ]
            rows = []
            for values, row in zip(zip(*columns, strict=True), factor.rows, strict=True):
                if None in values or (len(unique) < len(scope) and first(values) != values):
                    continue
                rows.append(row_of((take(values), row[1])))
            factor.scope, factor.rows = unique, rows
        return bool(replaced)

    def _replaceable(self) -> dict[int, tuple[int, dict[int, int]]]:
        """Return variable -> another that determines it, and that one's value -> its value."""
        replaced: dict[int, tuple[int, dict[int, int]]] = {}
        kept: set[int] = set()
        for factor in self.factors:
            if len(factor.scope) < 2:
                continue
            columns = zip(factor.scope, _columns(factor), strict=True)
            for (u, first), (v, second) in combinations(columns, 2):
                size = len(self.domains[u])
                if u in replaced or v in replaced or size != len(self.domains[v]):
                    continue
                keep, drop = (u, v) if v not in kept else (v, u)
                if drop in kept:
                    continue
                pairs = {*zip(first, second, strict=True)}
                if len(pairs) <= size and len(pairs) == len({*first}) == len({*second}):
                    replaced[drop] = (keep, dict(pairs) if drop == v else {b: a for a, b in pairs})
                    kept.add(keep)
        return replaced

    def rebuilt(self) -> Presolved:
        """Return the problem in the remaining variables and values, renumbered without gaps."""
        problem, small = self.problem, Problem(self.problem.components)
        number, renumber = {}, {}
        every = zip(self.parent, self.maps, problem.parts, strict=True)
        of = grouped((p, (part, own)) for p, own, parts in every for part in parts)
        for v in sorted(set(self.parent)):
            values = sorted(self.domains[v])
            number[v] = small.variable(problem.names[v], len(values), _parts(of.get(v, ()), values))
            renumber[v] = {x: i for i, x in enumerate(values)}
        for factor in self.factors:
            new = [renumber[v] for v in factor.scope]
            rows = [
                row_of((tuple([to[x] for to, x in zip(new, values, strict=True)]), costs))
                for values, costs in factor.rows
            ]
            small.factors.append(Factor(factor.name, tuple(number[v] for v in factor.scope), rows))
        source = [
            (number[p], {renumber[p][x]: own for x, own in m.items() if x in renumber[p]})
            for p, m in zip(self.parent, self.maps, strict=True)
        ]
        return Presolved(small, source)


def _parts(
    found: Sequence[tuple[Part, Mapping[int, int]]], values: Sequence[int]
) -> tuple[Part, ...]:
    """Return the distinct parts of a merged variable that differ between its values.

    Args:
        found: The parts of all variables that were merged, each with a map from the values of the
            remaining variable to those of its own.
        values: Values of the remaining variable.
    """
    out: dict[tuple[int, ...], Part] = {}
    for part, own in found:
        column = tuple([part.values[own[x]] for x in values])
        if min(column) < max(column):
            out.setdefault(column, Part(part.name, column))
    return tuple(out.values())
