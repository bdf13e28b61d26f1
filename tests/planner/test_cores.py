"""Cores against trying everything: they contradict each other, and no part of them does."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planner.solvers.cores import core
from shardwright.planner.solvers.problem import Factor, Problem, Row


def possible(problem: Problem, factors: list[Factor]) -> bool:
    """Whether some assignment satisfies these factors of `problem`."""
    return any(
        all(any(r.values == tuple(values[v] for v in f.scope) for r in f.rows) for f in factors)
        for values in product(*problem.domains)
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small ones; about half of them have no solution."""
    problem = Problem(("cost",))
    for i in range(draw(st.integers(1, 5))):
        problem.variable(f"v{i}", draw(st.integers(1, 3)))
    for i in range(draw(st.integers(1, 8))):
        scope = draw(st.lists(st.integers(0, len(problem.names) - 1), min_size=1, max_size=3))
        rows = list(product(*(problem.domains[v] for v in scope)))
        kept = draw(st.lists(st.sampled_from(rows), max_size=len(rows), unique=True))
        problem.factor(f"f{i}", scope, [Row(values, (0,)) for values in kept])
    return problem


@settings(max_examples=150)
@given(problems())
def test_a_core_is_a_contradiction_that_needs_all_of_its_factors(problem: Problem) -> None:
    found = core(problem)
    if found is None:
        assert possible(problem, problem.factors)
        return
    assert found == [f for f in problem.factors if f in found], "in the order of the problem"
    assert not possible(problem, found)
    for left_out in found:
        assert possible(problem, [f for f in found if f is not left_out])


def test_what_has_nothing_to_do_with_it_is_left_out() -> None:
    problem = Problem(("cost",))
    for i in range(40):
        problem.variable(f"v{i}", 2)
    for i in range(39):
        same = [Row((0, 0), (1,)), Row((1, 1), (1,))]
        problem.factor(f"same {i}", [i, i + 1], same)
    problem.factor("begin", [10], [Row((0,), (0,))])
    problem.factor("end", [13], [Row((1,), (0,))])
    problem.factor("other", [30], [Row((1,), (0,))])
    found = core(problem)
    assert found is not None
    assert [f.name for f in found] == ["same 10", "same 11", "same 12", "begin", "end"]
