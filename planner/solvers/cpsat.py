"""OR-tools CP-SAT: one literal a row, sums of rows equal the literals of the values they hold.

Row sums instead of implications: with implications the bound of the linear relaxation is lost and
optimality is not proven in minutes; with row sums it is proven at the root. So one worker, on the
full relaxation, is best: measured on 6 layers of a dense decoder 0.05 s, where two workers, each
with a search of its own, prove nothing within 10 s. Probing and symmetries take half of the time
and find nothing on these problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.errors import SolverError
from shardwright.planner.solvers import needs_ortools
from shardwright.planner.solvers.problem import Factor, Problem, Result

WORKERS = 1
SEED = 0
REFUSED = "cpsat refuses the problem: {}; use --solver lp"


def solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
) -> Result:
    """Minimise one component of `problem` under `caps`.

    Raises:
        SolverError: OR-tools is not installed, or sums of costs do not fit 64 bits.
    """
    try:
        from ortools.sat.python import cp_model as cp
    except ImportError:
        raise needs_ortools("cpsat") from None
    if not all(factor.rows for factor in problem.factors):
        return Result("infeasible", None, 0)
    model = cp.CpModel()
    choices = _choices(model, problem)
    for c, cap in caps.items():
        costs = choices.costs(c)
        if cap < costs.least:
            return Result("infeasible", None, 0)
        if cap < costs.least + costs.room:
            model.add(costs.over_least(cp) <= cap - costs.least)
    problem.limits.add_to(model, choices.values)
    costs = choices.costs(component)
    model.minimize(costs.over_least(cp))
    if hint is not None:
        for literal, chosen in choices.hinted(hint):
            model.add_hint(literal, chosen)
    solver = cp.CpSolver()
    parameters = solver.parameters
    parameters.max_time_in_seconds = seconds
    parameters.num_workers, parameters.random_seed = WORKERS, SEED
    parameters.linearization_level = 2
    parameters.symmetry_level = parameters.cp_model_probing_level = 0
    status = solver.solve(model)
    if status == cp.MODEL_INVALID:
        reason = model.validate().split(":")[0]
        raise SolverError(REFUSED.format(reason))
    if status == cp.INFEASIBLE:
        return Result("infeasible", None, 0)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        return Result("unknown", None, 0)
    found = tuple(
        next(x for x, literal in group.items() if solver.value(literal)) for group in choices.values
    )
    cost = problem.accept(found)[component]
    if status == cp.OPTIMAL:
        return Result("optimal", found, cost)
    bound = costs.least + _below(solver.best_objective_bound)
    return Result("feasible", found, min(bound, cost))


class _Costs(NamedTuple):
    """A component: what every assignment costs, and what literals add to that."""

    least: int
    added: list[tuple[Any, int]]

    @property
    def room(self) -> int:
        """All that is added."""
        return sum(weight for _, weight in self.added)

    def over_least(self, cp: Any) -> Any:
        """The sum of what is added.

        Raises:
            SolverError: it does not fit 64 bits. Somewhat below, CP-SAT itself refuses the model.
        """
        if self.room >= 2**63:
            raise SolverError(REFUSED.format("sums of costs do not fit 64 bits"))
        return cp.LinearExpr.weighted_sum([a for a, _ in self.added], [w for _, w in self.added])


@dataclass
class _Choices:
    """Literals: per variable of each value, per factor of each row."""

    problem: Problem
    values: list[dict[int, Any]]
    rows: list[list[Any]]

    def costs(self, component: int) -> _Costs:
        """What a component sums; least is that of each factor's cheapest row."""
        costs = [[row.costs[component] for row in f.rows] for f in self.problem.factors]
        least = [min(found) for found in costs]
        added = [
            (literal, cost - low)
            for rows, found, low in zip(self.rows, costs, least, strict=True)
            for literal, cost in zip(rows, found, strict=True)
            if cost > low
        ]
        return _Costs(sum(least), added)

    def hinted(self, hint: Sequence[int]) -> Iterator[tuple[Any, bool]]:
        """What each literal is under an assignment."""
        for group, value in zip(self.values, hint, strict=True):
            for x, literal in group.items():
                yield literal, x == value
        for factor, rows in zip(self.problem.factors, self.rows, strict=True):
            values = tuple(hint[v] for v in factor.scope)
            if len(factor.scope) > 1:  # else they are those of the values
                for literal, row in zip(rows, factor.rows, strict=True):
                    yield literal, row.values == values


def _choices(model: Any, problem: Problem) -> _Choices:
    """Literals for all choices, and the constraints between them."""
    values = [
        {x: model.new_bool_var(f"{name}={x}") for x in domain}
        for name, domain in zip(problem.names, problem.domains, strict=True)
    ]
    for group in values:
        model.add_exactly_one(group.values())
    return _Choices(problem, values, [_rows(model, f, values) for f in problem.factors])


def _rows(model: Any, factor: Factor, values: list[dict[int, Any]]) -> list[Any]:
    """A literal for each row of a factor, equal to those of the values that it holds."""
    if not factor.scope:
        return [1]
    if len(factor.scope) == 1:
        group = values[factor.scope[0]]
        model.add_exactly_one(group[row.values[0]] for row in factor.rows)
        return [group[row.values[0]] for row in factor.rows]
    rows = [model.new_bool_var(f"{factor.name}#{i}") for i in range(len(factor.rows))]
    model.add_exactly_one(rows)
    for k, v in enumerate(factor.scope):
        held: dict[int, list[Any]] = {x: [] for x in values[v]}
        for literal, row in zip(rows, factor.rows, strict=True):
            held[row.values[k]].append(literal)
        for x, literal in values[v].items():
            model.add(sum(held[x]) == literal)
    return rows


def _below(bound: float) -> int:
    """A whole number that `bound` stands for, or one below where a float cannot tell."""
    return round(bound) if abs(bound) < 2**53 else int(math.nextafter(bound, -math.inf))
