"""Elimination of a problem that is solved several times, each time at other costs.

With one component, which variables are eliminated and which rows are joined hangs on the rows
alone. So that is worked out once, with numbers in place of costs: the first stand for those of the
rows, then one for no costs, and each sum, and each least of some, has the next one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from shardwright.planner.solvers.bucket_elimination import Derived, Eliminated, Work
from shardwright.planner.solvers.problem import Factor, Problem, row_of
from shardwright.planner.solvers.tables import Key

Group = list[tuple[int, int]]
"""(Number of costs, value of a variable), of which the least is taken."""


class Again:
    """What can be eliminated of a problem, at any costs of its rows."""

    def __init__(self, problem: Problem, limit: int, deadline: float = math.inf) -> None:
        numbers = count()
        numbered = problem.without_factors(("number",))
        numbered.factors = [
            Factor(f.name, f.scope, [row_of((x, (next(numbers),))) for x, _ in f.rows])
            for f in problem.factors
        ]
        work = _Noting(numbered, limit, next(numbers))
        work.run(deadline)
        self.steps, self.pattern = work.steps, work.result()
        del work.plus  # a method of its own: else all tables wait for the garbage collector

    def at(self, problem: Problem) -> Eliminated:
        """What is left of a problem with the same rows, of one component."""
        costs = [*(row[1][0] for factor in problem.factors for row in factor.rows), 0]
        add = costs.append
        for pairs, groups in self.steps:
            for a, b in pairs:
                add(costs[a] + costs[b])
            for group in groups:
                add(min([costs[i] for i, _ in group]))
        left, derived = self.pattern.problem, self.pattern.derived
        out = left.without_factors(problem.components)
        out.factors = [
            Factor(f.name, f.scope, [row_of((x, (costs[i],))) for x, (i,) in f.rows])
            for f in left.factors
        ]
        chosen = [Derived(d.variable, d.above, _Least(d.choice, costs)) for d in derived]
        return Eliminated(out, self.pattern.kept, chosen)


class _Noting(Work):
    """Elimination with numbers in place of costs, of which `zero` is that of none, the last."""

    def __init__(self, problem: Problem, limit: int, zero: int) -> None:
        self.steps: list[tuple[list[tuple[int, int]], list[Group]]] = []
        self.pairs: list[tuple[int, int]] = []
        super().__init__(problem, limit)
        self.plus, self.zero, self.free = self.sum, zero, zero + 1

    def sum(self, a: int, b: int) -> int:
        """The number of a sum."""
        self.pairs.append((a, b))
        self.free += 1
        return self.free - 1

    def least(self, choices: Mapping[Key, list[tuple[Any, int]]]) -> dict[Key, tuple[Any, Any]]:
        """The number of the least, and in place of the value that it is of, what it is of."""
        groups = [*choices.values()]
        self.steps.append((self.pairs, groups))
        self.pairs = []
        first = self.free
        self.free += len(groups)
        return {key: (first + i, group) for i, (key, group) in enumerate(choices.items())}


class _Least(dict[Key, int]):
    """The value of least costs for each choice of other variables, worked out where it is asked."""

    def __init__(self, groups: Mapping[Key, Any], costs: Sequence[int]) -> None:
        super().__init__()
        self.groups, self.costs = groups, costs

    def __missing__(self, key: Key) -> int:
        return min((self.costs[i], x) for i, x in self.groups[key])[1]
