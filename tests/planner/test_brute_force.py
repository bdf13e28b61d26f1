"""Every solver against trying everything, on random problems."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.solvers import backtracking, buckets, cpsat, depth_first, lp
from shardwright.planner.solvers.problem import Problem, Row
from tests.planner.problems import CAPS, ROWS, SECONDS, brute_force, check, problems


@settings(max_examples=60)
@given(problems(), CAPS)
def test_cpsat_is_brute_force(problem: Problem, caps: dict[int, int]):
    best = brute_force(problem, 0, caps)
    check(problem, 0, caps, best, cpsat.solve(problem, 0, caps, None, SECONDS))


@settings(max_examples=300)
@given(problems(), CAPS, st.sampled_from([1, 2**40, 2**70]), st.data())
def test_lp_is_brute_force(problem: Problem, caps: dict[int, int], scale: int, data):
    """At any size of costs: what a float cannot hold is proven too."""
    large = Problem(problem.components, problem.names, problem.domains)
    for f in problem.factors:
        rows = [Row(x, (scale * c[0] + i, *c[1:])) for i, (x, c) in enumerate(f.rows)]
        large.factor(f.name, f.scope, rows)
    best = brute_force(large, 0, caps)
    hint = data.draw(st.none() | st.tuples(*(st.integers(0, len(d) - 1) for d in problem.domains)))
    check(large, 0, caps, best, lp.solve(large, 0, caps, hint, SECONDS))


@settings(max_examples=300)
@given(problems(), CAPS, ROWS, st.data())
def test_backtracking_is_brute_force(problem: Problem, caps: dict[int, int], rows: int, data):
    best = brute_force(problem, 0, caps)
    hint = data.draw(st.none() | st.tuples(*(st.integers(0, len(d) - 1) for d in problem.domains)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "ROWS", rows)  # below its default the bounds are not exact
        check(problem, 0, caps, best, backtracking.solve(problem, 0, caps, hint, SECONDS))


@settings(max_examples=100)
@given(problems(), CAPS, ROWS, st.integers(0, 20))
def test_bounds_hold_when_the_budget_runs_out(
    problem: Problem, caps: dict[int, int], rows: int, nodes: int
):
    best = brute_force(problem, 0, caps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "ROWS", rows)
        patch.setattr(depth_first, "NODES", nodes)
        result = backtracking.solve(problem, 0, caps, None, SECONDS)
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
