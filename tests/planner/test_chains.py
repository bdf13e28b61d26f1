"""Chains of many layers: what elimination is for."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from shardwright.planner.solvers import backtracking, cpsat
from shardwright.planner.solvers.elimination import COSTS, Front, hull, summed
from shardwright.planner.solvers.presolve import presolve
from shardwright.planner.solvers.problem import Problem, Row
from tests.planner.problems import SECONDS, assignments, check


def block(problem: Problem, before: int, number: int) -> int:
    """A layer with three readers of one tensor, two residual additions and three weights."""
    seed = random.Random(1)  # the same layer each time

    def table(density: float, highest: int, variables: Sequence[int]) -> None:
        rows = [
            Row(values, (0, seed.randint(0, highest)))
            for values in product(range(3), repeat=len(variables))
            if seed.random() < density
        ]
        problem.factor(f"table {number}", variables, rows)

    q, k, v, a, o, m, y, after = (problem.variable(f"{n}{number}", 3) for n in "qkvaomyx")
    for reader in (q, k, v):
        table(1, 40, (before, reader))
    for op in ((q, k, a), (a, v, o), (before, o, y), (y, m, after)):
        table(0.8, 10, op)
    table(1, 40, (y, m))
    for weight in (q, v, m):
        rows = [Row((i,), (64 >> i, seed.randint(0, 60))) for i in range(3)]
        problem.factor(f"weight {number}", (weight,), rows)
    return after


def chain(blocks: int) -> Problem:
    problem = Problem(("bytes", "time"))
    last = problem.variable("x", 3)
    for number in range(blocks):
        last = block(problem, last, number)
    return problem


def least_times(blocks: int) -> dict[int, int]:
    """Bytes -> least time of `chain(blocks)`, by dynamic programming from layer to layer."""
    one = chain(1)
    steps: dict[tuple[int, int], dict[int, int]] = {}
    for assignment in assignments(one):
        if (price := one.price(assignment)) is not None:
            step = steps.setdefault((assignment[0], assignment[-1]), {})
            step[price[0]] = min(price[1], step.get(price[0], price[1]))
    state: dict[int, dict[int, int]] = {i: {0: 0} for i in range(3)}
    for _ in range(blocks):
        following: dict[int, dict[int, int]] = {}
        for (i, j), step in steps.items():
            times = following.setdefault(j, {})
            for (a, s), (b, t) in product(state.get(i, {}).items(), step.items()):
                times[a + b] = min(s + t, times.get(a + b, s + t))
        state = following
    out: dict[int, int] = {}
    for times in state.values():
        for size, t in times.items():
            out[size] = min(t, out.get(size, t))
    return out


def test_backtracking_proves_a_chain_of_32_layers_at_every_budget():
    small = presolve(chain(32))
    assert small is not None
    problem, times = small.problem, least_times(32)
    low = min(times)
    high = min(size for size, t in times.items() if t == min(times.values()))
    check(problem, 0, {}, low, backtracking.solve(problem, 0, {}, None, SECONDS))
    for cap in (low - 1, low, low + 1, low * 5 // 3, (low + 2 * high) // 3, high + 1):
        best = min((t for size, t in times.items() if size <= cap), default=None)
        result = backtracking.solve(problem, 1, {0: cap}, None, SECONDS)
        check(problem, 1, {0: cap}, best, result)


def transitions(blocks: int) -> Problem:
    """Layers as the planner makes them: modes of ops, and boundaries where a change has a price."""
    problem = Problem(("bytes", "time"))
    boundary = [
        Row((i, j), (0, 7 + 4 * abs(i - j) if i != j else 0))
        for i, j in product(range(3), repeat=2)
    ]
    times = {"000": 9, "111": 11, "220": 16, "011": 14, "101": 12, "022": 18}
    modes = [Row(tuple(map(int, mode)), (0, t)) for mode, t in times.items()]
    before = problem.variable("x", 3)
    for number in range(blocks):
        q, k, v, a, o, m, y, after = (problem.variable(f"{n}{number}", 3) for n in "qkvaomyx")
        for ends in ((before, q), (before, k), (before, v), (y, m)):
            problem.factor(f"boundary {number}", ends, boundary)
        for op in ((q, k, a), (a, v, o), (before, o, y), (y, m, after)):
            problem.factor(f"op {number}", op, modes)
        for weight, size in ((q, 40), (v, 24), (m, 88)):
            rows = [Row((i,), (size >> i, 0)) for i in range(3)]
            problem.factor(f"weight {number}", (weight,), rows)
        before = after
    return problem


def test_both_solvers_agree_on_a_chain_of_32_layers():
    small = presolve(transitions(32))
    assert small is not None
    problem = small.problem
    size = backtracking.solve(problem, 0, {}, None, SECONDS).bound
    for component, caps in ((0, {}), (1, {}), (1, {0: size * 21 // 20})):
        ours = backtracking.solve(problem, component, caps, None, SECONDS)
        check(problem, component, caps, ours.bound, ours)
        theirs = cpsat.solve(problem, component, caps, ours.assignment, SECONDS)
        check(problem, component, caps, ours.bound, theirs)


def test_backtracking_stops_with_a_valid_bound_when_time_is_up():
    problem = chain(32)
    best = min(least_times(32).values())
    result = backtracking.solve(problem, 1, {}, [0] * len(problem.names), 0.0)
    assert result.bound <= best
    if result.assignment is not None:
        price = problem.price(result.assignment)
        assert price is not None and price[1] >= best


def test_backtracking_gives_the_same_assignment_every_time():
    problem = chain(8)
    solve = partial(backtracking.solve, problem, 1, {0: 800}, None, SECONDS)
    assert solve() == solve()


def hulls(name: str) -> st.SearchStrategy[Front]:
    """Hulls of up to eight points, of which several may lie on a line."""
    costs = st.tuples(st.integers(0, 12), st.integers(0, 12))
    points = st.lists(costs, min_size=1, max_size=8)
    return points.map(
        lambda many: hull(sorted([(x, y, (name, n)) for n, (x, y) in enumerate(many)], key=COSTS))
    )


@given(hulls("a"), hulls("b"))
def test_the_sums_of_two_hulls_are_merged_by_slope(a: Front, b: Front) -> None:
    """The same points, with the same choices, as the hull of all sums."""
    sums = [(x + u, y + v, (c, d)) for x, y, c in a for u, v, d in b]
    assert summed(a, b) == hull(sorted(sums, key=COSTS))
