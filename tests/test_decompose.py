"""Limits, and the solver for large problems, against trying everything."""

from __future__ import annotations

import random
import time
from itertools import product

import numpy as np
import pytest

from benchmarks import decompose
from benchmarks.decompose.ascent import Ascent
from benchmarks.decompose.contract import contract
from benchmarks.decompose.limits import LimitedProblem, Limits, Use
from benchmarks.decompose.mend import mend
from benchmarks.decompose.model import model
from benchmarks.decompose.network import Network, Spans
from benchmarks.decompose.parallel import side_by_side
from benchmarks.decompose.part import Free, improve
from benchmarks.decompose.rows import scarce
from benchmarks.decompose.search import Hints, Search
from shardwright.errors import SolverError
from shardwright.planner.solvers.problem import Result, Row

SEEDS = range(40)


def random_problem(seed: int, variables: int = 6) -> LimitedProblem:
    """Tables over pairs and triples, with gaps; memory over time that is scarce."""
    pick = random.Random(seed)
    problem = LimitedProblem(("cost", "other"))
    sizes = [pick.randint(1, 4) for _ in range(variables)]
    for v, size in enumerate(sizes):
        problem.variable(f"v{v}", size)
    for v in range(variables):
        rows = [Row((x,), (pick.randint(0, 9), pick.randint(0, 5))) for x in range(sizes[v])]
        problem.factor(f"f{v}", (v,), rows)
    for k in range(variables + 1):
        scope = pick.sample(range(variables), 3 if k == 0 else 2)
        rows = [
            Row(x, (pick.randint(-5, 30), pick.randint(0, 3)))
            for x in product(*(range(sizes[v]) for v in scope))
            if pick.random() < 0.8
        ]
        problem.factor(f"g{k}", scope, rows)
    moments = 5
    problem.limits.bounds = [pick.randint(8, 16) for _ in range(moments)]
    for v in range(variables):
        first = pick.randrange(moments)
        last = pick.randint(first, moments)
        weights = tuple(pick.randint(0, 9) for _ in range(sizes[v]))
        problem.limits.uses.append(Use(v, first, last, weights))
    return problem


def least(problem: LimitedProblem, caps: dict[int, int]) -> int | None:
    """The optimum, by trying everything; limits counted row by row."""
    best: int | None = None
    for x in product(*problem.domains):
        costs = problem.price(x)
        used = [
            sum(u.weights[x[u.variable]] for u in problem.limits.uses if u.first <= row < u.last)
            for row in range(len(problem.limits.bounds))
        ]
        fits = all(u <= b for u, b in zip(used, problem.limits.bounds, strict=True))
        if costs is not None and fits and all(costs[c] <= cap for c, cap in caps.items()):
            best = costs[0] if best is None else min(best, costs[0])
    return best


def proven(problem: LimitedProblem, caps: dict[int, int], result: Result) -> None:
    """The result is the optimum, or there is none."""
    best = least(problem, caps)
    if best is None:
        assert (result.status, result.assignment) == ("infeasible", None)
        return
    assert (result.status, result.bound) == ("optimal", best)
    assert result.assignment is not None
    assert problem.accept(result.assignment, caps)[0] == best


def test_the_random_problems_are_worth_trying():
    found = [least(random_problem(seed), {}) for seed in SEEDS]
    assert 3 < sum(f is None for f in found) < len(found) - 10


@pytest.mark.parametrize("seed", SEEDS)
def test_limits_and_caps_are_held_and_the_optimum_is_found(seed: int):
    problem = random_problem(seed)
    for caps in ({}, {1: 12}):
        proven(problem, caps, decompose.solve(problem, 0, caps, None, 60, 1))


@pytest.mark.parametrize("seed", range(3))
def test_workers_find_what_one_finds(seed: int):
    problem = random_problem(seed, 8)
    proven(problem, {}, decompose.solve(problem, 0, {}, None, 60, 2))


def test_what_breaks_a_limit_is_not_accepted():
    problem = LimitedProblem(("cost",))
    problem.variable("v", 2)
    problem.factor("f", (0,), [Row((0,), (0,)), Row((1,), (5,))])
    problem.limits = Limits([3], [Use(0, 0, 1, (4, 2))])
    assert problem.accept((1,)) == (5,)
    with pytest.raises(SolverError):
        problem.accept((0,))


def networks() -> list[tuple[LimitedProblem, Network]]:
    """Random problems that have a solution, as networks."""
    problems = [random_problem(seed) for seed in SEEDS]
    return [(p, model(p, 0, {}).network) for p in problems if least(p, {}) is not None]


def solutions(network: Network) -> list[tuple[float, tuple[int, ...]]]:
    """All solutions of a network, with their costs."""
    values = [range(len(c)) for c in network.costs]
    small = int(np.prod([len(v) for v in values[:6]]))
    assert small < 5000
    found = []
    for head in product(*values[:6]):
        for tail in product(*values[6:]):
            x = head + tail
            score = network.score(x)
            if score.whole:
                found.append((score.cost, x))
    return found


def test_a_contracted_network_has_the_same_least_cost_and_the_way_back():
    gone = impossible = 0
    for seed in SEEDS:
        network = model(random_problem(seed), 0, {}).network
        before, small = solutions(network), contract(network)
        if small is None:
            assert not before
            impossible += 1
            continue
        after = solutions(small.network)
        for cost, x in after:
            score = network.score(small.way.expand(x))
            assert score.whole and score.cost == cost + small.constant
        assert bool(before) == bool(after)
        assert not before or min(before)[0] == min(after)[0] + small.constant
        gone += len(network.costs) - len(small.network.costs)
    assert gone and impossible


def test_bounds_and_what_is_cut_by_them_leave_all_solutions():
    cut = 0
    for _, whole in networks()[:12]:
        small = contract(whole)
        assert small is not None
        network = small.network
        prices = np.random.default_rng(0).uniform(0, 1, len(network.limits.bounds))
        ascent = Ascent(network)
        ascent.price(prices)
        for _ in range(3):
            ascent.forward()
            ascent.backward()
            reduced = ascent.reduced(float(prices @ network.limits.bounds))
            for cost, x in solutions(network):
                for v, i in enumerate(x):
                    assert cost >= reduced.bound + reduced.values[v][i] - 1e-6
                moved = ascent.moved(reduced, cost - reduced.bound + 1e-6)
                score = moved.score(x)
                assert score.whole and score.cost == cost
                cut += sum(int(np.isinf(t).sum()) for t in moved.tables)
    assert cut > sum(int(np.isinf(t).sum()) for _, n in networks()[:12] for t in n.tables)


def test_scarce_rows_hold_what_all_hold():
    for seed in range(30):
        pick = np.random.default_rng(seed)
        ends = np.sort(pick.integers(0, 13, (8, 2)), axis=1)
        weights = [pick.integers(0, 9, 3).astype(float) for _ in range(8)]
        bounds = pick.integers(5, 40, 12).astype(float)
        limits = Spans(np.arange(8), ends[:, 0], ends[:, 1], weights, bounds, bounds)
        values = pick.integers(0, 50, 12)
        for low, (first, last) in zip(limits.least(values).tolist(), ends.tolist(), strict=True):
            assert low == min(values[first:last], default=np.inf)
        small, rows = scarce(limits)
        assert len(small.bounds) == len(rows) < len(bounds)
        for _ in range(50):
            x = pick.integers(0, 3, 8).tolist()
            fits = [(own.usage(x) <= own.bounds).all() for own in (limits, small)]
            assert fits[0] == fits[1]


def test_a_part_gets_better_and_mends_what_is_broken():
    mended = 0
    for _, network in networks()[:12]:
        x = [0] * len(network.costs)
        variables = list(range(len(x)))
        free = Free(variables, [np.arange(len(c)) for c in network.costs])
        found = improve(network, x, free, 10)
        assert found is not None and found.proven
        score = network.score(found.values)
        assert score.whole and score.cost == min(solutions(network))[0]
        mended += not network.score(x).whole
    assert mended


def test_a_part_is_not_solved_once_the_time_is_over():
    network = networks()[0][1]
    x = [0] * len(network.costs)
    free = Free(list(range(len(x))), [np.arange(len(c)) for c in network.costs])
    assert improve(network, x, free, 10, time.monotonic()) is None


def test_parts_stay_small_where_rows_hold_many_that_share_no_table():
    """A part of all that a row holds had millions of terms, and took minutes to write down."""
    count, rows = 4_000, 400
    ends = np.sort(np.random.default_rng(1).integers(0, rows, (count, 2)), axis=1)
    weights = [np.array([1.0, 0.0])] * count
    bounds = np.full(rows, count / 8)
    limits = Spans(np.arange(count), ends[:, 0], ends[:, 1] + 1, weights, bounds, bounds)
    network = Network([np.array([0.0, 1.0])] * count, [], [], limits)
    hints = Hints([np.zeros(2)] * count, np.ones(rows))
    search = Search(network, [0] * count, hints)
    parts = [search.part() for _ in range(20)]
    assert 20 < max(len(part.variables) for part in parts) < count / 4
    assert search.run(2, 0.0, time.monotonic() + 60).x != [0] * count


def test_tasks_run_in_processes_and_keep_their_order():
    assert side_by_side([lambda k=k: (time.sleep(0.01 * (3 - k)), k)[1] for k in range(3)]) == [
        0,
        1,
        2,
    ]


def test_mending_ends_within_bounds_where_single_changes_can():
    problem = LimitedProblem(("cost",))
    for v in range(6):
        problem.variable(f"v{v}", 2)
        problem.factor(f"f{v}", (v,), [Row((0,), (0,)), Row((1,), (1 + v,))])
        problem.limits.uses.append(Use(v, v // 2, 3, (5, 1)))
    problem.limits.bounds = [10, 16, 18]
    network = model(problem, 0, {}).network
    assert network.score([0] * 6).over
    found = mend(network, [0] * 6, time.monotonic() + 60)
    score = network.score(found)
    assert score.whole and score.cost <= 2 + 3 + 1
    assert mend(network, found, time.monotonic() + 60) == found


def chosen(least: int, more: int) -> LimitedProblem:
    """Two variables, each of which costs one of two amounts, and together three times the least."""
    problem = LimitedProblem(("cost",))
    for v in range(2):
        problem.variable(f"v{v}", 2)
        problem.factor(f"f{v}", (v,), [Row((0,), (0,)), Row((1,), (more,))])
    rows = [Row((a, b), (least * (a + b),)) for a in range(2) for b in range(2) if a + b]
    problem.factor("both", (0, 1), rows)
    return problem


@pytest.mark.parametrize("limited", [False, True])
def test_costs_that_floats_cannot_tell_apart_are_refused(limited: bool):
    """What all must pay may be large; what they may choose not."""
    for least, more in ((2**60, 3), (5, 2**40)):
        problem = chosen(least, more)
        if limited:
            problem.limits = Limits([3], [Use(0, 0, 1, (4, 2))])
        result = decompose.solve(problem, 0, {}, None, 20, 1)
        assert (result.status, result.bound) == ("optimal", least + more)
    problem = chosen(5, 2**55 + 1)
    problem.factor("again", (1,), [Row((0,), (2**55 + 3,)), Row((1,), (0,))])
    with pytest.raises(SolverError, match="2\\^52"):
        decompose.solve(problem, 0, {}, None, 20, 1)


@pytest.mark.parametrize("seed", range(60))
def test_costs_near_the_end_of_64_bits_are_exact_or_refused(seed: int):
    """Factors differ by little, and all of them cost about 2^59."""
    pick = random.Random(seed)
    problem = random_problem(seed)
    problem.limits = Limits()
    large, dear = 2 ** pick.choice([51, 53, 59, 61]), pick.choice([0.0, 0.0, 0.2])
    for factor in problem.factors:
        few = pick.random() >= dear
        factor.rows = [
            Row(x, ((large if few else large + pick.randrange(large)) + cost, other))
            for x, (cost, other) in factor.rows
        ]
    for caps in ({}, {1: 9}):
        try:
            found = decompose.solve(problem, 0, caps, None, 60, 1)
        except SolverError as error:
            assert "2^52" in str(error)
        else:
            proven(problem, caps, found)


def test_limits_that_floats_cannot_tell_apart_are_refused():
    problem = random_problem(0)
    problem.limits = Limits([2**53], [Use(0, 0, 1, (2**53 + 1,) * 4)])
    with pytest.raises(SolverError, match="2\\^52"):
        decompose.solve(problem, 0, {}, None, 20, 1)
