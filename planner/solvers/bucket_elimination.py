"""Minimise variables out of a problem, exactly, where the tables that this makes stay small.

A variable's factors are joined, and for each choice of the other variables only the value of least
costs is kept: the rest is a smaller problem with the same optimum (bucket elimination; see
`solvers/buckets.py`). With several components least means dominating: one value must cost no more
in any of them, so that the optimum of every positive weighing of the components, and under every
cap on them, survives. Where no value dominates, those that are dominated everywhere go, and the
variable stays.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any

from shardwright.planner.solvers.problem import Problem, Row
from shardwright.planner.solvers.reduction import Reduction
from shardwright.planner.solvers.tables import Key, Plus, Table, Vector, join, pick, plus

ROWS = 64
"""Tables are no larger unless that is asked for: what is left is for the solvers."""


@dataclass(frozen=True)
class Derived:
    """An eliminated variable, and its value for each choice of the variables that it hung on."""

    variable: int
    above: tuple[int, ...]
    choice: dict[Key, int]


@dataclass(frozen=True)
class Eliminated(Reduction):
    """The problem that is left, and how the values of the others follow from its assignments."""

    kept: list[int]
    """Per variable that is left: its number in the old problem."""
    derived: list[Derived]

    def expand(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """The best assignment of the old problem that agrees with `assignment`."""
        values = [0] * (len(self.kept) + len(self.derived))
        for v, x in zip(self.kept, assignment, strict=True):
            values[v] = x
        for d in reversed(self.derived):
            values[d.variable] = d.choice[tuple([values[w] for w in d.above])]
        return tuple(values)

    def contract(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """The values that an assignment of the old problem gives to what is left."""
        return tuple(assignment[v] for v in self.kept)


def eliminate(problem: Problem, limit: int = ROWS, deadline: float = math.inf) -> Eliminated:
    """Eliminate every variable that can be, by tables of no more rows than `limit` or than before.

    What is not eliminated when `deadline` (of `time.monotonic`) has passed is left.
    """
    work = Work(problem, limit)
    work.run(deadline)
    return work.result()


@dataclass
class Work:
    """Tables that are left, where each variable stands, and which variable comes next."""

    problem: Problem
    limit: int
    tables: dict[int, Table] = field(default_factory=dict)
    near: list[set[int]] = field(default_factory=list)
    """Per variable the numbers of its tables."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Variables to visit, and the largest that each one's join can be."""
    queue: list[tuple[int, int]] = field(default_factory=list)
    derived: list[Derived] = field(default_factory=list)
    made: int = 0
    plus: Plus = field(init=False)
    zero: Any = field(init=False)

    def __post_init__(self) -> None:
        self.near = [set() for _ in self.problem.names]
        self.plus = add if self.single else plus  # numbers are faster than vectors of one
        self.zero = 0 if self.single else (0,) * len(self.problem.components)
        for factor in self.problem.factors:
            at = sorted(range(len(factor.scope)), key=factor.scope.__getitem__)
            key = pick(at)
            if self.single:
                rows: dict[Key, Any] = {key(values): cost for values, (cost,) in factor.rows}
            else:
                rows = {key(values): costs for values, costs in factor.rows}
            self.put(Table(tuple(factor.scope[k] for k in at), rows))
        for v in range(len(self.near)):
            self.push(v)

    def run(self, deadline: float) -> None:
        """Eliminate until nothing is left to, or `deadline` has passed."""
        while self.queue and time.monotonic() < deadline:
            size, v = heapq.heappop(self.queue)
            if self.sizes.get(v) == size:
                self.visit(v)

    @property
    def single(self) -> bool:
        """Whether there is one component."""
        return len(self.problem.components) == 1

    def put(self, table: Table) -> None:
        """Add a table."""
        self.tables[self.made] = table
        for v in table.scope:
            self.near[v].add(self.made)
        self.made += 1

    def push(self, v: int) -> None:
        """Have a variable visited, the smaller its join can be the sooner."""
        around = {w for i in self.near[v] for w in self.tables[i].scope}
        size = math.prod(len(self.problem.domains[w]) for w in around)
        self.sizes[v] = size
        heapq.heappush(self.queue, (size, v))

    def visit(self, v: int) -> None:
        """Eliminate v, or set it aside until something next to it changes."""
        del self.sizes[v]
        numbers = sorted(self.near[v], key=lambda i: (len(self.tables[i].rows), i))
        table = self.joined(v, numbers)
        if table is None:
            return
        at = table.scope.index(v)
        before, after = slice(at), slice(at + 1, None)
        choices: dict[Key, list[tuple[Any, int]]] = {}
        for values, costs in table.rows.items():
            choices.setdefault(values[before] + values[after], []).append((costs, values[at]))
        if self.single:
            least = self.least(choices)
        else:
            fronts = {key: _front(found) for key, found in choices.items()}
            if any(len(f) > 1 for f in fronts.values()):
                self.drop(v, {x for f in fronts.values() for _, x in f}, numbers)
                return
            least = {key: f[0] for key, f in fronts.items()}
        for i in numbers:
            for w in self.tables.pop(i).scope:
                self.near[w].discard(i)
        above = table.scope[before] + table.scope[after]
        self.put(Table(above, {key: costs for key, (costs, _) in least.items()}))
        self.derived.append(Derived(v, above, {key: x for key, (_, x) in least.items()}))
        for w in above:
            self.push(w)

    def least(self, choices: Mapping[Key, list[tuple[Any, int]]]) -> dict[Key, tuple[Any, int]]:
        """The least costs of each choice of the other variables, and the value that they are of."""
        return {key: min(found) for key, found in choices.items()}

    def joined(self, v: int, numbers: Sequence[int]) -> Table | None:
        """The tables of v as one, None where it has too many rows."""
        if not numbers:
            return Table((v,), {(x,): self.zero for x in self.problem.domains[v]})
        table = self.tables[numbers[0]]
        limit = max(self.limit, sum(len(self.tables[i].rows) for i in numbers))
        for i in numbers[1:]:
            joined = join(table, self.tables[i], limit, self.plus)
            if joined is None or len(joined.rows) > limit:
                return None
            table = joined
        return table

    def drop(self, v: int, useful: set[int], numbers: Sequence[int]) -> None:
        """Remove the rows in which v has a value that something else dominates everywhere."""
        for i in numbers:
            table = self.tables[i]
            at = table.scope.index(v)
            kept = {key: c for key, c in table.rows.items() if key[at] in useful}
            if len(kept) < len(table.rows):
                table.rows = kept
                for w in table.scope:  # which may be decided now
                    self.push(w)

    def result(self) -> Eliminated:
        """What is left."""
        gone = {d.variable for d in self.derived}
        kept = [v for v in range(len(self.near)) if v not in gone]
        number = {v: i for i, v in enumerate(kept)}
        left = Problem(self.problem.components)
        for v in kept:
            old = self.problem
            left.variable(old.names[v], len(old.domains[v]), old.parts[v])
        for i, table in self.tables.items():
            rows = [Row(key, (c,) if self.single else c) for key, c in table.rows.items()]
            left.factor(f"t{i}", [number[v] for v in table.scope], rows)
        return Eliminated(left, kept, self.derived)


def _front(choices: list[tuple[Vector, int]]) -> list[tuple[Vector, int]]:
    """The choices that no other one dominates; of equals the one of least value."""
    out: list[tuple[Vector, int]] = []
    for costs, x in sorted(choices):
        if not any(all(a <= b for a, b in zip(c, costs, strict=True)) for c, _ in out):
            out.append((costs, x))
    return out
