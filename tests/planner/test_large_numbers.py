"""Costs and caps of any size: what does not fit 64 bits, or a float, is exact all the same."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.solvers import cpsat
from shardwright.planner.solvers.cpsat import digits
from shardwright.planner.solvers.problem import Problem, Row
from tests.planner.problems import (
    MODULES,
    SECONDS,
    SOLVERS,
    all_prices,
    brute_force,
    check,
    problems,
)

SIZES = (30, 2**53, 2**62 - 1, 2**62, 2**63, 2**64 + 1, 2**130)


@settings(max_examples=25)
@given(problems(SIZES), st.data())
def test_all_solvers_are_brute_force(problem: Problem, data):
    """Also where a cap is one less than what a solution costs."""
    found = sorted({price[1] for price in all_prices(problem, {})}) or [0]
    cap = data.draw(st.sampled_from(found)) + data.draw(st.sampled_from([-1, 0, 1, 2**64]))
    caps = data.draw(st.sampled_from([{}, {1: cap}]))
    hint = data.draw(st.none() | st.tuples(*(st.integers(0, len(d) - 1) for d in problem.domains)))
    best = brute_force(problem, 0, caps)
    for solver in MODULES:
        check(problem, 0, caps, best, solver.solve(problem, 0, caps, hint, SECONDS))


@settings(max_examples=50)
@given(problems((30, 1000)), st.integers(1, 4), st.integers(0, 2000))
def test_digits_of_few_bits_carry(problem: Problem, bits: int, cap: int):
    """Sums of many places, each of which carries to the next."""
    caps = {1: cap}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "BITS", bits)
        patch.setattr(digits, "DIGIT", bits)
        result = cpsat.solve(problem, 0, caps, None, SECONDS)
    check(problem, 0, caps, brute_force(problem, 0, caps), result)


@settings(max_examples=50)
@given(problems((30, 1000)), st.integers(1, 40))
def test_what_breaks_ties_is_minimised_by_itself(problem: Problem, bits: int):
    """To the same least sum as if it were not said that it does."""
    apart = Problem(problem.components, problem.names, problem.domains, parts=problem.parts)
    apart.ties = 1 + sum(max((r.costs[1] % 7 for r in f.rows), default=0) for f in problem.factors)
    for f in problem.factors:
        rows = [Row(x, (apart.ties * c[0] + c[1] % 7, *c[1:])) for x, c in f.rows]
        apart.factor(f.name, f.scope, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "BITS", bits)
        patch.setattr(digits, "DIGIT", bits)
        result = cpsat.solve(apart, 0, {}, None, SECONDS)
    check(apart, 0, {}, brute_force(apart, 0, {}), result)


def test_presolve_drops_no_solution():
    """OR-tools 9.15 proves 2^38 here with all of its presolve (google/or-tools#5293)."""
    problem = Problem(("a",))
    for i, size in enumerate((3, 3, 3)):
        problem.variable(f"v{i}", size)
    problem.factor(
        "f", (1,), [Row((0,), (845213433,)), Row((1,), (0,)), Row((2,), (728452987601,))]
    )
    costs: dict[tuple[int, ...], int] = {
        (0, 0, 0): 18479,
        (0, 0, 1): 92070732412330950631882752,
        (0, 0, 2): 23949,
        (0, 1, 0): 312,
        (0, 1, 1): 1267558529495817069542740385327,
        (0, 1, 2): 10,
        (1, 0, 0): 274032693511,
        (2, 2, 2): 2,
    }
    rows = [Row(v, (costs.get(v, 0),)) for v in product(range(3), repeat=3)]
    problem.factor("g", (0, 1, 2), rows)
    for solver in MODULES:
        check(problem, 0, {}, 0, solver.solve(problem, 0, {}, None, SECONDS))


def test_what_a_float_does_not_show_is_a_difference():
    """Two assignments of ten bits more than a float has, one apart."""
    large = 2**59
    problem = Problem(("a",))
    for i in range(3):
        problem.variable(f"v{i}", 2)
    rows = [
        Row(v, (0 if sum(v) == 3 else large + 3 - sum(v),)) for v in product(range(2), repeat=3)
    ]
    problem.factor("f", (0, 1, 2), rows)
    problem.factor("not all", (0, 1), [Row(v, (0,)) for v in ((0, 0), (0, 1), (1, 0))])
    for solver in MODULES:
        check(problem, 0, {}, large + 1, solver.solve(problem, 0, {}, None, SECONDS))


def test_a_bound_of_large_numbers_is_one_when_time_is_up():
    problem = Problem(("a",))
    for i in range(30):
        problem.variable(f"v{i}", 3)
    for i in range(29):
        rows = [
            Row((x, y), (2**70 * ((7 * x + 5 * y + i) % 11) + (x + 2 * y + i) % 13,))
            for x, y in product(range(3), repeat=2)
        ]
        problem.factor(f"f{i}", (i, i + 1), rows)
    best = cpsat.solve(problem, 0, {}, None, SECONDS)
    assert best.status == "optimal"
    for seconds in (0.0, 0.01, 0.05):
        result = cpsat.solve(problem, 0, {}, None, seconds)
        assert result.bound <= best.bound
        if result.assignment is not None:
            price = problem.price(result.assignment)
            assert price is not None and price[0] >= best.bound


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("cap", [2**63 - 1, 2**63, 2**70])
def test_caps_beyond_64_bits(solve, cap: int):
    problem = Problem(("a", "b"))
    problem.variable("x", 2)
    problem.factor("price", (0,), [Row((0,), (3, 1)), Row((1,), (4, 0))])
    check(problem, 0, {1: cap}, 3, solve(problem, 0, {1: cap}, None, SECONDS))
    check(problem, 0, {1: -cap}, None, solve(problem, 0, {1: -cap}, None, SECONDS))


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("cost", [2**62, 2**63, 2**70])
def test_costs_about_64_bits(solve, cost: int):
    problem = Problem(("a", "b"))
    for i in range(2):
        problem.variable(f"v{i}", 2)
        problem.factor(f"price {i}", (i,), [Row((0,), (0, cost)), Row((1,), (cost, 0))])
    check(problem, 0, {}, 0, solve(problem, 0, {}, None, SECONDS))
    check(problem, 0, {1: cost}, cost, solve(problem, 0, {1: cost}, None, SECONDS))
