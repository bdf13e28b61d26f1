"""Who proves a plan is asked for the plan that is kept, once, and may not find a better one."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.errors import SolverError
from shardwright.planner.problem.builder import COMPONENTS
from shardwright.planner.problem.objective import question
from shardwright.planner.problem.optimize import optimize, prove
from shardwright.planner.solvers import cpsat, elimination
from shardwright.planner.solvers.problem import Problem, Result, Row
from tests.marks import long
from tests.planner.test_toys import SECONDS
from tests.planner.toys import toy


def test_the_solver_is_asked_once_and_only_for_its_proof() -> None:
    asked = []

    def solve(*given: Any) -> Result:
        asked.append(given)
        return cpsat.solve(*given)

    it = toy("chain")
    found = optimize(it.small, solve, SECONDS, movable=it.network.movable)
    assert found.optimal and not asked
    assert found.proven() and found.proven()
    assert len(asked) == 1


def test_a_better_plan_than_the_best_is_an_error() -> None:
    problem = Problem(COMPONENTS)
    rows = [Row((x,), (held, 0, 0, 0, 0)) for x, held in enumerate((1, 2))]
    problem.factor("held", [problem.variable("weight", 2)], rows)
    asked = question(problem, 0, False)
    found = Result("feasible", (1,), 0)
    assert prove(asked, {}, found, cpsat.solve, SECONDS).result.assignment == (0,)
    with pytest.raises(SolverError, match="please report it"):
        prove(asked, {}, found._replace(status="optimal"), cpsat.solve, SECONDS)


@pytest.mark.parametrize("name", ["tied", "twice", long("conflict"), long("residual")])
def test_where_elimination_cannot_the_solver_finds_the_same_plan(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price of a byte and the plan; under a budget too."""
    it = toy(name)
    for memory in (None, 10**9):
        how = {"memory": memory, "movable": it.network.movable}
        want = optimize(it.small, cpsat.solve, SECONDS, **how)
        with monkeypatch.context() as patch:
            patch.setattr(elimination.Elimination, "run", lambda *_: None)
            found = optimize(it.small, cpsat.solve, SECONDS, **how)
        assert found.optimal and found.byte_price == want.byte_price
        assert (found.costs, found.objective, found.bound) == (
            want.costs, want.objective, want.bound
        )  # fmt: skip
