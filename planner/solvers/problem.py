"""`Problem`, the optimisation problem that all solvers take. It knows nothing of tensors.

A problem has variables with finite domains, and factors. A factor is a table of the allowed rows
over a few variables, each row with its costs. A constraint is a factor whose rows cost nothing; a
price is a factor that allows every row. A solver minimises the sum of one component of the chosen
rows' costs, under upper bounds on others. This is a weighted constraint network; in row form its
linear relaxation is the local polytope, integral on the networks that models give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter, mul
from typing import Literal, NamedTuple

from shardwright.errors import SolverError

CostVector = tuple[int, ...]
"""One number for each component."""


class Row(NamedTuple):
    """Domain indices of a factor's variables, and the costs of choosing them."""

    values: tuple[int, ...]
    costs: CostVector


Key = tuple[int, ...]


def pick(positions: Sequence[int]) -> Callable[[Key], Key]:
    """Return a function from a tuple to the tuple of its elements at `positions`."""
    if len(positions) > 1:
        return itemgetter(*positions)
    if positions:
        (only,) = positions
        return lambda key: (key[only],)
    return lambda key: ()


row_of = partial(tuple.__new__, Row)
"""Makes a `Row` from a pair in half of the time. Each step of a reduction makes all rows anew."""


@dataclass
class Factor:
    """A table over the variables in `scope`."""

    name: str
    scope: tuple[int, ...]
    rows: list[Row]

    def row(self, values: tuple[int, ...]) -> Row | None:
        """Return the row with these values, or None."""
        return next((r for r in self.rows if r.values == values), None)


class Part(NamedTuple):
    """A sub-variable: an integer for each value of its variable.

    The parts determine the value of the variable: no two values agree in all parts.
    """

    name: str
    values: Sequence[int]


@dataclass
class Problem:
    """Variables (name, domain, parts) and factors; `components` names the costs.

    A variable without given parts has one part, itself. A cost of component 0 modulo `ties` only
    breaks ties: no assignment's remainders add up to `ties`.
    """

    components: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    domains: list[list[int]] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    parts: list[tuple[Part, ...]] = field(default_factory=list)
    ties: int = 1

    def __post_init__(self) -> None:
        if not self.parts:
            pairs = zip(self.names, self.domains, strict=True)
            self.parts = [(Part(name, range(len(domain))),) for name, domain in pairs]

    def variable(self, name: str, size: int, parts: tuple[Part, ...] | None = None) -> int:
        """Add a variable with the values 0 … size-1, and return its number."""
        self.names.append(name)
        self.domains.append(list(range(size)))
        self.parts.append((Part(name, range(size)),) if parts is None else parts)
        return len(self.names) - 1

    def without_factors(self, components: tuple[str, ...]) -> Problem:
        """Return a problem with the same variables and these components, without factors."""
        return Problem(components, self.names, self.domains, [], self.parts)

    def factor(self, name: str, scope: Sequence[int], rows: Sequence[Row]) -> None:
        """Add a table. A variable that is twice in `scope` must have equal values there."""
        unique = list(dict.fromkeys(scope))
        if len(unique) < len(scope):
            at = [scope.index(v) for v in unique]
            rows = [
                Row(tuple(r.values[i] for i in at), r.costs)
                for r in rows
                if all(r.values[k] == r.values[scope.index(v)] for k, v in enumerate(scope))
            ]
        # Duplicate rows count once, at the lower costs (compared in order).
        best = dict(rows)
        if len(best) < len(rows):
            for values, costs in rows:
                best[values] = min(best[values], costs)
            rows = [*map(row_of, best.items())]
        self.factors.append(Factor(name, tuple(unique), [*rows]))

    def weighed(self, weights: Sequence[Sequence[int]]) -> Problem:
        """Return the problem with one component for each row of weights over the components."""
        out = self.without_factors(tuple(f"w{i}" for i in range(len(weights))))
        for f in self.factors:
            rows = [row_of((x, tuple([sum(map(mul, w, c)) for w in weights]))) for x, c in f.rows]
            out.factors.append(Factor(f.name, f.scope, rows))
        return out

    def most(self, component: int) -> int:
        """Return an upper bound on any assignment's sum of a component."""
        return sum(max((r.costs[component] for r in f.rows), default=0) for f in self.factors)

    def least(self, component: int) -> int:
        """Return a lower bound on any assignment's sum of a component."""
        return sum(min((r.costs[component] for r in f.rows), default=0) for f in self.factors)

    def price(self, assignment: Sequence[int]) -> CostVector | None:
        """Return the costs of a full assignment; None if a factor forbids it."""
        total = [0] * len(self.components)
        for factor in self.factors:
            values = tuple(assignment[v] for v in factor.scope)
            row = factor.row(values)
            if row is None:
                return None
            total = [a + b for a, b in zip(total, row.costs, strict=True)]
        return tuple(total)

    def accept(self, answer: Sequence[int], caps: Mapping[int, int] | None = None) -> CostVector:
        """Check an assignment that a solver returned, and return its costs.

        Raises:
            SolverError: the assignment has the wrong length, or a factor or a cap forbids it.
        """
        costs = self.price(answer) if len(answer) == len(self.domains) else None
        over = costs is None or any(costs[c] > cap for c, cap in (caps or {}).items())
        if costs is None or over:
            raise SolverError("the solver returned an assignment that its problem forbids")
        return costs


Status = Literal["optimal", "feasible", "infeasible", "unknown"]


class Result(NamedTuple):
    """A solver's answer for one component: the best assignment, and a lower bound."""

    status: Status
    assignment: tuple[int, ...] | None
    bound: int


Solver = Callable[[Problem, int, Mapping[int, int], Sequence[int] | None, float], Result]
"""`solve(problem, component, caps, hint, seconds)`: minimise one component under caps on others."""
