"""A small optimisation problem that knows nothing of tensors, and every solver understands.

Variables with finite domains, and factors: tables of the rows that are allowed over a few
variables, each with its costs. A constraint is a factor whose rows cost nothing; a price is one
that allows everything. The sum of the chosen rows' costs is minimised component by component
(lexicographically), under upper bounds on components. This is a weighted constraint network; in
row form its linear relaxation is the local polytope, integral on the networks that models give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Costs = tuple[int, ...]


class Row(NamedTuple):
    """Domain indices of the factor's variables, and what choosing them costs."""

    values: tuple[int, ...]
    costs: Costs


@dataclass
class Factor:
    """A table over the variables in `scope`."""

    name: str
    scope: tuple[int, ...]
    rows: list[Row]


@dataclass
class Problem:
    """Variables (name, size of the domain) and factors; `components` names the costs."""

    components: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    domains: list[list[int]] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)

    def variable(self, name: str, size: int) -> int:
        """Add a variable whose values are 0 … size-1 and return its number."""
        self.names.append(name)
        self.domains.append(list(range(size)))
        return len(self.names) - 1

    def factor(self, name: str, scope: Sequence[int], rows: Sequence[Row]) -> None:
        """Add a table; a variable that stands twice in `scope` must have equal values."""
        unique = list(dict.fromkeys(scope))
        if len(unique) < len(scope):
            at = [scope.index(v) for v in unique]
            rows = [
                Row(tuple(r.values[i] for i in at), r.costs)
                for r in rows
                if all(r.values[k] == r.values[scope.index(v)] for k, v in enumerate(scope))
            ]
        # A row that stands twice counts once, at its lower costs (compared in order).
        best: dict[tuple[int, ...], Costs] = {}
        for row in rows:
            if row.values not in best or row.costs < best[row.values]:
                best[row.values] = row.costs
        self.factors.append(Factor(name, tuple(unique), [Row(v, c) for v, c in best.items()]))

    def price(self, assignment: Sequence[int]) -> Costs | None:
        """Costs of a full assignment, None where a factor forbids it."""
        total = [0] * len(self.components)
        for factor in self.factors:
            values = tuple(assignment[v] for v in factor.scope)
            row = next((r for r in factor.rows if r.values == values), None)
            if row is None:
                return None
            total = [a + b for a, b in zip(total, row.costs, strict=True)]
        return tuple(total)


Status = Literal["optimal", "feasible", "infeasible", "unknown"]


class Result(NamedTuple):
    """What a solver found for one component: best assignment, and a bound on the component."""

    status: Status
    assignment: tuple[int, ...] | None
    bound: int


Solver = Callable[[Problem, int, Mapping[int, int], Sequence[int] | None, float], Result]
"""`solve(problem, component, caps, hint, seconds)`: minimise one component under caps on others."""


@dataclass(frozen=True)
class Solution:
    """A full assignment, its costs, the bound on each, and whether all of them are proven."""

    assignment: tuple[int, ...]
    costs: Costs
    bounds: Costs
    optimal: bool


def minimise(
    problem: Problem,
    solve: Solver,
    order: Sequence[int],
    caps: Mapping[int, int],
    slack: Mapping[int, float],
    seconds: float,
    hint: Sequence[int] | None = None,
) -> Solution | Status:
    """Minimise components in `order`, each under the optimum (plus slack) of those before it.

    Returns:
        The solution, or "infeasible", or "unknown" where the time ran out before any was found.
    """
    deadline = time.monotonic() + seconds
    caps, bounds, optimal = dict(caps), [0] * len(problem.components), True
    best = tuple(hint) if hint is not None and _within(problem, hint, caps) else None
    for component in order:
        start = best if best is not None else hint
        result = solve(problem, component, caps, start, max(deadline - time.monotonic(), 0.01))
        if result.assignment is None and (best is None or result.status == "infeasible"):
            return result.status
        best = best if result.assignment is None else result.assignment
        assert best is not None
        costs = problem.price(best)
        assert costs is not None, "a solver returned an assignment that a factor forbids"
        bounds[component] = result.bound
        optimal &= result.status == "optimal"
        # What was reached is a cap for the rest even where it is not proven. In whole numbers: a
        # float cannot hold large costs, and a cap below the costs would be infeasible.
        reached = costs[component]
        cap = reached + int(reached * slack.get(component, 0.0))
        caps[component] = min(caps.get(component, cap), cap)
    if best is None:
        raise ValueError("no component to minimise")
    costs = problem.price(best)
    assert costs is not None
    return Solution(best, costs, tuple(bounds), optimal)


def _within(problem: Problem, assignment: Sequence[int], caps: Mapping[int, int]) -> bool:
    """Whether an assignment satisfies the factors and the caps."""
    costs = problem.price(assignment)
    return costs is not None and all(costs[c] <= cap for c, cap in caps.items())
