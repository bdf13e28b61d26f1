"""`presolve`: smaller problems, the same solutions."""

from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.solvers.presolve import narrowed, presolve
from shardwright.planner.solvers.problem import Part, Problem, Row
from tests.planner.problems import all_prices, assignments, problems


@settings(max_examples=200)
@given(problems(), st.integers(0, 12))
def test_presolve_keeps_solutions(problem: Problem, at: int):
    """All at once, and what some factors leave narrowed by the others."""
    small = presolve(replace(problem, factors=problem.factors[:at]))
    small = small and narrowed(small, problem.factors[at:])
    prices = sorted(all_prices(problem, {}))
    if small is None:
        assert not prices
        return
    assert sorted(all_prices(small.problem, {})) == prices
    for assignment in assignments(small.problem):
        expanded = small.expand(assignment)
        assert problem.price(expanded) == small.problem.price(assignment)


def test_presolve_sees_what_only_a_join_forbids():
    """Each pair of factors leaves every value its support; both together leave none."""
    problem = Problem(("a",))
    for name in "xyz":
        problem.variable(name, 2)
    equal, other = (
        [Row(v, (0,)) for v in product(range(2), repeat=2) if (v[0] == v[1]) == same]
        for same in (True, False)
    )
    problem.factor("equal", (0, 1), equal)
    problem.factor("other", (1, 0), other)
    assert presolve(problem) is None


def test_presolve_merges_chains_of_equals():
    problem = Problem(("a",))
    for i in range(6):
        problem.variable(f"v{i}", 4)
    for i in range(5):
        problem.factor(f"shift {i}", (i, i + 1), [Row((x, (x + 1) % 4), (x,)) for x in range(4)])
    small = presolve(problem)
    assert small is not None and len(small.problem.names) == 1
    assert sorted(all_prices(problem, {})) == sorted(all_prices(small.problem, {}))


def test_parts_still_tell_values_apart():
    """A value that is gone takes its parts along, and what became one variable has each part once.

    What is the same for all that is left says nothing, and goes.
    """
    problem = Problem(("a",))
    problem.variable("x", 3, (Part("x axis", (0, 1, 0)), Part("x partial", (0, 0, 1))))
    problem.variable("y", 3, (Part("y axis", (5, 5, 7)), Part("y partial", (2, 0, 0))))
    problem.factor("same", (0, 1), [Row((0, 1), (0,)), Row((1, 2), (0,))])
    small = presolve(problem)
    assert small is not None and len(small.problem.names) == 1
    assert small.problem.parts == [(Part("x axis", (0, 1)), Part("y axis", (5, 7)))]
