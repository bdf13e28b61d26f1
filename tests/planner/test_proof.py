"""Who proves a plan is asked for the plan that is kept, once, and may not find a better one."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.errors import SolverError
from shardwright.planner.problem.builder import COMPONENTS
from shardwright.planner.problem.objective import Digits
from shardwright.planner.problem.optimize import optimize
from shardwright.planner.problem.proof import prove
from shardwright.planner.problem.warm_start import WarmStart
from shardwright.planner.solvers import lp
from shardwright.planner.solvers.problem import Problem, Result, Row
from tests.planner.test_toys import SECONDS
from tests.planner.toys import toy


def test_the_solver_is_asked_once_and_only_for_its_proof() -> None:
    asked = []

    def solve(*given: Any) -> Result:
        asked.append(given)
        return lp.solve(*given)

    it = toy("chain")
    found = optimize(it.small, solve, SECONDS, movable=it.network.movable)
    assert found.optimal and not asked
    assert found.proven() and found.proven()
    assert len(asked) == 1


def test_a_better_plan_than_the_best_is_an_error() -> None:
    problem = Problem(COMPONENTS)
    rows = [Row((x,), (held, 0, 0, 0, 0)) for x, held in enumerate((1, 2))]
    problem.factor("held", [problem.variable("weight", 2)], rows)
    digits = Digits.of(problem)
    whole = WarmStart(digits.split(problem).problem, digits, {}, 0.0)
    found = Result("feasible", (1,), 0)
    assert prove(whole, 0, found, lp.solve, SECONDS).result.assignment == (0,)
    with pytest.raises(SolverError, match="please report it"):
        prove(whole, 0, found._replace(status="optimal"), lp.solve, SECONDS)
