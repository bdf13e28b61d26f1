"""Every solver against trying everything, on random problems."""

import time
from itertools import combinations, count
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.solvers import backtracking, cpsat, dense, elimination
from shardwright.planner.solvers.problem import Problem, Result, Row
from shardwright.planner.solvers.residual import solve_residual
from tests.planner.problems import CAPS, POINTS, SECONDS, brute_force, check, problems


@settings(max_examples=60)
@given(problems(), CAPS)
def test_cpsat_is_brute_force(problem: Problem, caps: dict[int, int]):
    best = brute_force(problem, 0, caps)
    check(problem, 0, caps, best, cpsat.solve(problem, 0, caps, None, SECONDS))


@settings(max_examples=300)
@given(problems(), CAPS, POINTS, st.data())
def test_backtracking_is_brute_force(problem: Problem, caps: dict[int, int], points: int, data):
    best = brute_force(problem, 0, caps)
    hint = data.draw(st.none() | st.tuples(*(st.integers(0, len(d) - 1) for d in problem.domains)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "POINTS", points)  # below its default variables are left
        check(problem, 0, caps, best, backtracking.solve(problem, 0, caps, hint, SECONDS))


@settings(max_examples=200)
@given(problems(), POINTS)
def test_what_elimination_leaves_is_solved_at_each_price(problem: Problem, points: int):
    sizes = {v: len(domain) for v, domain in enumerate(problem.domains)}
    two = problem.weighed([[int(c == k) for c in range(len(problem.components))] for k in (0, 1)])
    work = elimination.Elimination(sizes, elimination.tables_of(two), elimination.hull)
    work.run(inf, points)
    for weight in (0, 1, 3, 1 << 90):
        asked = two.weighed([(weight, 1)])
        best = brute_force(asked, 0, {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elimination, "POINTS", points)
            check(asked, 0, {}, best, backtracking.search(work.weighed(weight), len(sizes), inf))
        for solve in (dense.solve, backtracking.solve):
            left = work.weighed(weight)
            check(asked, 0, {}, best, solve_residual(left, len(sizes), solve, inf))


def test_arrays_that_would_be_large_are_not_made() -> None:
    problem = Problem(("cost",))
    several = [problem.variable(f"v{n}", 10) for n in range(7)]
    for pair in combinations(several, 2):
        problem.factor("pair", pair, [Row((x, x), (1,)) for x in range(10)])
    assert dense.solve(problem, 0, {}, None, SECONDS) == Result("unknown", None, 0)


@settings(max_examples=100)
@given(problems(), CAPS, POINTS, st.integers(0, 20))
def test_bounds_hold_when_the_budget_runs_out(
    problem: Problem, caps: dict[int, int], points: int, seconds: int
):
    best = brute_force(problem, 0, caps)
    with pytest.MonkeyPatch.context() as patch:
        clock = count()
        patch.setattr(elimination, "POINTS", points)
        patch.setattr(time, "monotonic", lambda: float(next(clock)))
        result = backtracking.solve(problem, 0, caps, None, seconds)
    if result.status in ("optimal", "infeasible"):
        check(problem, 0, caps, best, result)
    elif result.status == "feasible":
        assert result.assignment is not None and best is not None
        price = problem.price(result.assignment)
        assert price is not None and result.bound <= best <= price[0]
        assert all(price[c] <= cap for c, cap in caps.items())
    else:
        assert result.assignment is None
        assert best is None or result.bound <= best


def test_a_factor_of_more_variables_than_an_array_has_dims_is_left_to_other_solvers() -> None:
    problem = Problem(("cost",))
    scope = [problem.variable(f"v{n}", 1) for n in range(dense.DIMS + 6)]
    problem.factor("all", scope, [Row((0,) * len(scope), (3,))])
    assert dense.solve(problem, 0, {}, None, 1.0).status == "unknown"
