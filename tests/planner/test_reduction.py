"""Chains of reductions: nothing is lost on the way there and back, and bounds stay bounds."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import SolverError
from shardwright.planner.problem.objective import Fitted
from shardwright.planner.solvers import backtracking, lp
from shardwright.planner.solvers.bucket_elimination import eliminate
from shardwright.planner.solvers.presolve import presolve
from shardwright.planner.solvers.problem import Problem, Result, Row
from shardwright.planner.solvers.reduction import Reduction, chain, solve_reduced
from tests.planner.problems import CAPS, SECONDS, assignments, brute_force, check, problems


def coarse(problem: Problem) -> Fitted:
    """In thirds: what is lost of each row's costs is less than one of them."""
    out = Problem(problem.components, problem.names, problem.domains)
    for f in problem.factors:
        rows = [Row(r.values, (r.costs[0] // 3, *r.costs[1:])) for r in f.rows]
        out.factor(f.name, f.scope, rows)
    return Fitted(out, 1, 3)


STEPS = st.lists(st.sampled_from([presolve, Reduction, partial(eliminate, limit=4)]), max_size=4)


@settings(max_examples=200)
@given(problems(), STEPS)
def test_there_and_back(problem: Problem, steps: list) -> None:
    small = chain(problem, *steps)
    if small is None:
        assert brute_force(problem, 0, {}) is None
        return
    for assignment in assignments(small.problem):
        if (price := small.problem.price(assignment)) is not None:
            assert problem.price(small.expand(assignment)) == price
            assert small.contract(small.expand(assignment)) == assignment


@settings(max_examples=100)
@given(problems(), CAPS, STEPS, st.data())
def test_a_solver_behind_a_chain_is_brute_force(
    problem: Problem, caps: dict[int, int], steps: list, data
) -> None:
    best = brute_force(problem, 0, caps)
    hint = data.draw(st.none() | st.tuples(*(st.integers(0, len(d) - 1) for d in problem.domains)))
    for solver in (backtracking, lp):
        check(problem, 0, caps, best, solve_reduced(problem, steps, solver.solve, caps, hint, 60.0))


@settings(max_examples=100)
@given(problems())
def test_bounds_of_a_coarser_problem_are_bounds(problem: Problem) -> None:
    result = solve_reduced(problem, [coarse, presolve], lp.solve, {}, None, SECONDS)
    best = brute_force(problem, 0, {})
    if best is None:
        assert result == Result("infeasible", None, 0)
    else:
        assert best - 2 * len(problem.factors) <= result.bound <= best


def test_what_cannot_be_is_a_result() -> None:
    """No step or solver behind the one that sees it is asked."""
    problem = Problem(("a",))
    problem.variable("x", 2)
    problem.factor("never", (0,), [])

    def not_asked(*_: object) -> Result:
        raise AssertionError

    found = solve_reduced(problem, [Reduction, presolve, eliminate], not_asked, {}, None, SECONDS)
    assert found == Result("infeasible", None, 0)


@pytest.mark.parametrize("answer", [(0,), (1,)])
def test_an_answer_that_the_problem_forbids_is_refused(answer: tuple[int, ...]) -> None:
    """One breaks the factor, the other the cap."""
    problem = Problem(("a", "b"))
    problem.variable("x", 2)
    problem.factor("price", (0,), [Row((1,), (0, 5))])

    def liar(*_: object) -> Result:
        return Result("optimal", answer, 0)

    with pytest.raises(SolverError, match="returned an assignment that its problem forbids"):
        solve_reduced(problem, [Reduction], liar, {1: 4}, None, SECONDS)
