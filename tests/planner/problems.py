"""Random problems for solvers, and what is true of them by trying everything."""

from collections.abc import Iterator, Mapping
from itertools import product

import pytest
from hypothesis import strategies as st

from shardwright.planner.solvers import backtracking, cpsat, elimination
from shardwright.planner.solvers.problem import CostVector, Problem, Result, Row

MODULES = (cpsat, backtracking)
SOLVERS = [pytest.param(m.solve, id=m.__name__.split(".")[-1]) for m in MODULES]
SECONDS = 60.0


def assignments(problem: Problem) -> Iterator[tuple[int, ...]]:
    return product(*(range(len(d)) for d in problem.domains))


def all_prices(problem: Problem, caps: Mapping[int, int]) -> Iterator[CostVector]:
    for assignment in assignments(problem):
        price = problem.price(assignment)
        if price is not None and all(price[c] <= cap for c, cap in caps.items()):
            yield price


def brute_force(problem: Problem, component: int, caps: Mapping[int, int]) -> int | None:
    return min((price[component] for price in all_prices(problem, caps)), default=None)


def check(
    problem: Problem, component: int, caps: Mapping[int, int], best: int | None, result: Result
) -> None:
    """`result` is the proven optimum `best`, or the proof that there is none."""
    if best is None:
        assert result == Result("infeasible", None, 0)
        return
    assert (result.status, result.bound) == ("optimal", best)
    assert result.assignment is not None
    price = problem.price(result.assignment)
    assert price is not None and price[component] == best
    assert all(price[c] <= cap for c, cap in caps.items())


@st.composite
def problems(draw: st.DrawFn, sizes: tuple[int, ...] = (0, 2, 30)) -> Problem:
    """A problem of two or three components, whose costs are at most one of `sizes`."""
    components = draw(st.integers(2, 3))
    problem = Problem(tuple("abc"[:components]))
    for i in range(draw(st.integers(1, 5))):
        problem.variable(f"v{i}", draw(st.integers(1, 4)))
    seed = draw(st.randoms(use_true_random=False))
    for i in range(draw(st.integers(0, 7))):
        scope = draw(st.lists(st.integers(0, len(problem.names) - 1), min_size=1, max_size=3))
        density = draw(st.sampled_from([0.5, 0.8, 1.0]))
        highest = draw(st.sampled_from(sizes))
        problem.factor(
            f"f{i}",
            scope,
            [
                Row(values, tuple(seed.randint(0, highest) for _ in range(components)))
                for values in product(*(range(len(problem.domains[v])) for v in scope))
                if seed.random() < density
            ],
        )
    return problem


CAPS = st.dictionaries(st.just(1), st.integers(0, 60))
POINTS = st.sampled_from([0, 4, 20, elimination.POINTS])
