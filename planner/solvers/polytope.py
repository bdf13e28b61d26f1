"""What is left of a problem at a node of branch and bound: tables of costs above a proven bound.

Moving costs from a table to the values that its rows hold, or the other way, changes the sum for no
assignment; and a table's least cost is paid by all of them. So whatever is moved, in whole numbers,

    cost + sum over caps of multiplier * (capped cost - cap) = lower + what is left in the tables,

no table holds less than zero, and `lower` bounds every assignment within the caps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.planner.solvers.problem import Problem
from shardwright.planner.solvers.tables import Key

Moves = list[list[dict[int, int]]]
"""Per table, position and value: the cost that moves from the rows to the value."""


@dataclass(frozen=True)
class Cap:
    """A limit on the sum of other costs: per table the rows' costs, and what they may sum to."""

    rows: list[dict[Key, int]]
    most: int


@dataclass
class Node:
    """Tables over variables, costs left of their rows and of values, and the bound so far."""

    scopes: list[tuple[int, ...]]
    rows: list[dict[Key, int]]
    values: list[dict[int, int]]
    caps: list[Cap]
    multipliers: list[int]
    lower: int

    def copy(self) -> Node:
        """The same with costs of its own."""
        return replace(
            self,
            rows=[dict(r) for r in self.rows],
            values=[dict(v) for v in self.values],
            multipliers=list(self.multipliers),
        )

    def move(self, moves: Moves, multipliers: Sequence[int]) -> None:
        """Move costs, and set the caps' multipliers (which must not be negative)."""
        for c, (cap, new) in enumerate(zip(self.caps, multipliers, strict=True)):
            more = new - self.multipliers[c]
            self.multipliers[c] = new
            self.lower -= more * cap.most
            for rows, costs in zip(self.rows, cap.rows, strict=True):
                for key in rows:
                    rows[key] += more * costs[key]
        for scope, rows, found in zip(self.scopes, self.rows, moves, strict=True):
            for key in rows:
                rows[key] -= sum([f[x] for f, x in zip(found, key, strict=True)])
            for v, f in zip(scope, found, strict=True):
                costs = self.values[v]
                for x in costs:
                    costs[x] += f[x]

    def tighten(self, limit: int) -> bool:
        """Raise the bound by what all must pay, drop what costs over `limit`; False if none is."""
        changed = True
        while changed:
            changed = False
            tables: list[dict[Any, int]] = [*self.rows, *self.values]
            for costs in tables:
                if not costs:
                    return False
                least = min(costs.values())
                if least:
                    self.lower += least
                    for key in costs:
                        costs[key] -= least
            room = limit - self.lower
            if room < 0:
                return False
            for costs in self.values:
                for x in [x for x, c in costs.items() if c > room]:
                    del costs[x]
            for scope, rows in zip(self.scopes, self.rows, strict=True):
                domains = [self.values[v] for v in scope]
                for key in [
                    key
                    for key, c in rows.items()
                    if c > room or not all(x in d for x, d in zip(key, domains, strict=True))
                ]:
                    del rows[key]
                for k, domain in enumerate(domains):
                    lost = domain.keys() - {key[k] for key in rows}
                    for x in lost:
                        del domain[x]
                    changed |= bool(lost)
        return True


def root(problem: Problem, caps: Sequence[int], fine: int) -> Node:
    """The whole problem, its first component in parts of a unit, `fine` of which make one."""
    scopes, rows = [], []
    capped: list[list[dict[Key, int]]] = [[] for _ in caps]
    lower, most = 0, list(caps)
    for factor in problem.factors:
        if factor.scope or not factor.rows:
            scopes.append(factor.scope)
            rows.append({r.values: fine * r.costs[0] for r in factor.rows})
            for c, out in enumerate(capped, 1):
                out.append({r.values: r.costs[c] for r in factor.rows})
        else:
            cost, *rest = factor.rows[0].costs
            lower += fine * cost
            most = [m - c for m, c in zip(most, rest, strict=True)]
    limits = [Cap(r, m) for r, m in zip(capped, most, strict=True)]
    values = [dict.fromkeys(domain, 0) for domain in problem.domains]
    return Node(scopes, rows, values, limits, [0] * len(limits), lower)
