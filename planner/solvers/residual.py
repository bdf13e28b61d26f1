"""Solves what elimination leaves with any solver: few variables, in tables of the best values."""

from __future__ import annotations

from typing import Any

from shardwright.planner.solvers.elimination import Elimination, assignment
from shardwright.planner.solvers.problem import Problem, Result, Row, Solver


def solve_residual(work: Elimination, count: int, solver: Solver, seconds: float) -> Result:
    """Minimise the first component of tables with one point a row (`Elimination.weighed`).

    Args:
        work: The tables, and which variables are left in them.
        count: Number of all variables.
        solver: The solver.
        seconds: Its time limit.

    Returns:
        The solver's answer, with the values of all variables.
    """
    place = {v: i for i, v in enumerate(work.left)}
    domains = [[*range(work.sizes[v])] for v in work.left]
    problem = Problem(("cost",), [f"variable {v}" for v in work.left], domains)
    for number, table in work.tables.items():
        rows = [Row(values, (front[0][0],)) for values, front in table.rows.items()]
        problem.factor(f"table {number}", [place[v] for v in table.scope], rows)
    result = solver(problem, 0, {}, None, seconds)  # CP-SAT takes longer with a hint
    if result.assignment is None:
        return result
    chosen: Any = None
    for v, value in zip(work.left, result.assignment, strict=True):
        chosen = v, value, chosen
    for table in work.tables.values():
        front = table.rows[tuple([result.assignment[place[v]] for v in table.scope])]
        chosen = chosen, front[0][2]
    return result._replace(assignment=assignment(chosen, count))
