"""OR-tools CP-SAT: one literal a row, sums of rows equal the literals of the values they hold.

Row sums instead of implications: with implications the bound of the linear relaxation is lost and
optimality is not proven in minutes; with row sums it is proven at the root.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwright.errors import SolverError
from shardwright.planner.problem import Problem, Result

WORKERS = 2
SEED = 0


def solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
) -> Result:
    """Minimise one component of `problem` under `caps`.

    Raises:
        SolverError: OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise SolverError(
            "solver 'cpsat' needs OR-tools: pip install ortools, or use --solver backtracking"
        ) from None
    model = cp_model.CpModel()
    literals = [
        [model.new_bool_var(f"{name}={x}") for x in domain]
        for name, domain in zip(problem.names, problem.domains, strict=True)
    ]
    for group in literals:
        model.add_exactly_one(group)
    totals: dict[int, list[tuple[object, int]]] = {c: [] for c in (component, *caps)}
    constants = dict.fromkeys(totals, 0)
    for factor in problem.factors:
        if not factor.rows:
            return Result("infeasible", None, 0)
        if not factor.scope:
            for c in totals:
                constants[c] += factor.rows[0].costs[c]
            continue
        if len(factor.scope) == 1:
            rows = [literals[factor.scope[0]][row.values[0]] for row in factor.rows]
            chosen = {row.values[0] for row in factor.rows}
            for x, literal in enumerate(literals[factor.scope[0]]):
                if x not in chosen:
                    model.add(literal == 0)
        else:
            rows = [model.new_bool_var(f"{factor.name}#{i}") for i in range(len(factor.rows))]
            model.add_exactly_one(rows)
            for k, v in enumerate(factor.scope):
                for x, literal in enumerate(literals[v]):
                    held = [b for b, r in zip(rows, factor.rows, strict=True) if r.values[k] == x]
                    model.add(cp_model.LinearExpr.sum(held) == literal)
            if hint is not None:
                values = tuple(hint[v] for v in factor.scope)
                for literal, row in zip(rows, factor.rows, strict=True):
                    model.add_hint(literal, row.values == values)
        # Over the least of the factor: CP-SAT wants the sum of all weights to fit 64 bits.
        for c, terms in totals.items():
            least = min(row.costs[c] for row in factor.rows)
            constants[c] += least
            terms += [
                (b, row.costs[c] - least)
                for b, row in zip(rows, factor.rows, strict=True)
                if row.costs[c] > least
            ]
    if hint is not None:
        for group, value in zip(literals, hint, strict=True):
            for x, literal in enumerate(group):
                model.add_hint(literal, x == value)

    def total(c: int) -> object:
        terms, weights = [b for b, _ in totals[c]], [w for _, w in totals[c]]
        return cp_model.LinearExpr.weighted_sum(terms, weights) + constants[c]

    for c, cap in caps.items():
        model.add(total(c) <= cap)  # type: ignore[operator]
    model.minimize(total(component))  # type: ignore[arg-type]
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = WORKERS
    solver.parameters.random_seed = SEED
    solver.parameters.linearization_level = 2
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:  # sums of costs that do not fit 64 bits, say
        reason = model.validate().split(":")[0]
        raise SolverError(f"cpsat refuses the problem: {reason}; use --solver backtracking")
    if status == cp_model.INFEASIBLE:
        return Result("infeasible", None, 0)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Result("unknown", None, 0)
    found = tuple(next(x for x, b in enumerate(group) if solver.value(b)) for group in literals)
    costs = problem.price(found)
    if costs is None:
        raise SolverError("cpsat returned an assignment that a factor forbids")
    if status == cp_model.OPTIMAL:
        return Result("optimal", found, costs[component])
    return Result("feasible", found, min(_below(solver.best_objective_bound), costs[component]))


def _below(bound: float) -> int:
    """A whole number that `bound` stands for, or one below where a float cannot tell."""
    return round(bound) if abs(bound) < 2**53 else int(math.nextafter(bound, -math.inf))
