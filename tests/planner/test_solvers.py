"""Solvers and `presolve` against each other and against trying everything."""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import SolverError, UsageError
from shardwright.planner import solvers
from shardwright.planner.solvers import backtracking, buckets, cpsat, depth_first, lp
from shardwright.planner.solvers.bucket_elimination import eliminate
from shardwright.planner.solvers.presolve import presolve
from shardwright.planner.solvers.problem import CostVector, Problem, Result, Row

MODULES = (cpsat, lp, backtracking)
SOLVERS = [pytest.param(m.solve, id=m.__name__.split(".")[-1]) for m in MODULES]
SECONDS = 60.0


# --- the reference


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


# --- random problems


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    components = draw(st.integers(2, 3))
    problem = Problem(tuple("abc"[:components]))
    for i in range(draw(st.integers(1, 5))):
        problem.variable(f"v{i}", draw(st.integers(1, 4)))
    seed = draw(st.randoms(use_true_random=False))
    for i in range(draw(st.integers(0, 7))):
        scope = draw(st.lists(st.integers(0, len(problem.names) - 1), min_size=1, max_size=3))
        density = draw(st.sampled_from([0.5, 0.8, 1.0]))
        highest = draw(st.sampled_from([0, 2, 30]))
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
ROWS = st.sampled_from([0, 4, 20, buckets.ROWS])


@settings(deadline=None, max_examples=60)
@given(problems(), CAPS)
def test_cpsat_is_brute_force(problem: Problem, caps: dict[int, int]):
    best = brute_force(problem, 0, caps)
    check(problem, 0, caps, best, cpsat.solve(problem, 0, caps, None, SECONDS))


@settings(deadline=None, max_examples=300)
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


@settings(deadline=None, max_examples=300)
@given(problems(), CAPS, ROWS, st.data())
def test_backtracking_is_brute_force(problem: Problem, caps: dict[int, int], rows: int, data):
    best = brute_force(problem, 0, caps)
    hint = data.draw(st.none() | st.tuples(*(st.integers(0, len(d) - 1) for d in problem.domains)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "ROWS", rows)  # below its default the bounds are not exact
        check(problem, 0, caps, best, backtracking.solve(problem, 0, caps, hint, SECONDS))


@settings(deadline=None, max_examples=100)
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


@settings(deadline=None, max_examples=200)
@given(problems())
def test_presolve_keeps_solutions(problem: Problem):
    small = presolve(problem)
    prices = sorted(all_prices(problem, {}))
    if small is None:
        assert not prices
        return
    assert sorted(all_prices(small.problem, {})) == prices
    for assignment in assignments(small.problem):
        expanded = small.expand(assignment)
        assert problem.price(expanded) == small.problem.price(assignment)
        assert small.contract(expanded) == assignment
    for assignment in assignments(problem):
        if problem.price(assignment) is not None:
            contracted = small.contract(assignment)
            assert contracted is not None and small.expand(contracted) == assignment
        else:
            contracted = small.contract(assignment)
            assert contracted is None or small.problem.price(contracted) is None


@settings(deadline=None, max_examples=200)
@given(problems(), CAPS, st.sampled_from([0, 4, 20, 1000]))
def test_eliminate_keeps_the_best_under_every_cap(
    problem: Problem, caps: dict[int, int], limit: int
):
    left = eliminate(problem, limit)
    for component in range(len(problem.components)):
        best = brute_force(problem, component, caps)
        assert brute_force(left.problem, component, caps) == best
    for assignment in assignments(left.problem):
        if (price := left.problem.price(assignment)) is not None:
            expanded = left.expand(assignment)
            assert problem.price(expanded) == price
            assert left.contract(expanded) == assignment


@settings(deadline=None, max_examples=100)
@given(problems())
def test_eliminate_of_one_component_leaves_nothing(problem: Problem):
    problem = problem.only([0])
    left = eliminate(problem, 10**6)
    assert left.problem.names == []
    best = brute_force(problem, 0, {})
    assert left.problem.price(()) == (None if best is None else (best,))


def test_lp_stops_with_a_valid_bound_when_time_is_up():
    problem = chain(8)
    best = min(least_times(8).values())
    for seconds in (0.0, 0.02):
        result = lp.solve(problem, 1, {}, None, seconds)
        assert result.bound <= best
        if result.assignment is not None:
            price = problem.price(result.assignment)
            assert price is not None and price[1] >= best


def test_cpsat_gives_the_same_assignment_with_one_worker_or_two(monkeypatch):
    problem = Problem(("a",))
    for i in range(6):
        problem.variable(f"v{i}", 3)
    for i in range(5):  # no two assignments cost the same
        rows = [
            Row((x, y), (3**i * x + 3 ** (i + 5) * y + 2**40 * (x == y),))
            for x, y in product(range(3), repeat=2)
        ]
        problem.factor(f"f{i}", (i, i + 1), rows)
    results = set()
    for workers in (1, 2):
        monkeypatch.setattr(cpsat, "WORKERS", workers)
        results.add(cpsat.solve(problem, 0, {}, None, SECONDS))
    assert results == {lp.solve(problem, 0, {}, None, SECONDS)}


# --- a chain of layers


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


# --- by hand


@pytest.mark.parametrize("solve", SOLVERS)
def test_empty_problem(solve):
    check(Problem(("a",)), 0, {}, 0, solve(Problem(("a",)), 0, {}, None, SECONDS))
    problem = Problem(("a",))
    problem.factor("constant", (), [Row((), (3,))])
    check(problem, 0, {}, 3, solve(problem, 0, {}, None, SECONDS))


@pytest.mark.parametrize("solve", SOLVERS)
def test_single_variable(solve):
    problem = Problem(("a",))
    problem.variable("free", 3)
    check(problem, 0, {}, 0, solve(problem, 0, {}, None, SECONDS))
    problem.factor("price", (0,), [Row((1,), (5,)), Row((2,), (4,))])
    result = solve(problem, 0, {}, None, SECONDS)
    check(problem, 0, {}, 4, result)
    assert result.assignment == (2,)


@pytest.mark.parametrize("solve", SOLVERS)
def test_variable_that_stands_twice(solve):
    problem = Problem(("a",))
    problem.variable("x", 2)
    problem.variable("y", 2)
    values = product(range(2), repeat=3)
    problem.factor("f", (0, 1, 0), [Row(v, (9 - sum(v) if v[0] == v[2] else 0,)) for v in values])
    assert problem.factors[0].scope == (0, 1) and len(problem.factors[0].rows) == 4
    check(problem, 0, {}, 6, solve(problem, 0, {}, None, SECONDS))


@pytest.mark.parametrize("solve", SOLVERS)
def test_costs_of_a_factor_without_variables_count_against_caps(solve):
    problem = Problem(("a", "b"))
    problem.variable("x", 2)
    problem.factor("constant", (), [Row((), (7, 5))])
    problem.factor("price", (0,), [Row((0,), (0, 2)), Row((1,), (1, 0))])
    check(problem, 0, {}, 7, solve(problem, 0, {}, None, SECONDS))
    check(problem, 0, {1: 6}, 8, solve(problem, 0, {1: 6}, None, SECONDS))


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("scope", [(), (0,), (0, 1)])
def test_factor_that_allows_nothing(solve, scope):
    problem = Problem(("a",))
    problem.variable("x", 2)
    problem.variable("y", 2)
    problem.factor("never", scope, [])
    check(problem, 0, {}, None, solve(problem, 0, {}, None, SECONDS))
    assert presolve(problem) is None


@pytest.mark.parametrize("solve", SOLVERS)
def test_cap_that_excludes_everything(solve):
    problem = Problem(("a", "b"))
    problem.variable("x", 2)
    problem.factor("price", (0,), [Row((0,), (0, 2)), Row((1,), (1, 3))])
    check(problem, 0, {1: 1}, None, solve(problem, 0, {1: 1}, None, SECONDS))
    check(problem, 0, {1: 2}, 0, solve(problem, 0, {1: 2}, None, SECONDS))


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


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_hint_need_not_be_feasible(solve):
    problem = Problem(("a", "b"))
    problem.variable("x", 3)
    problem.variable("y", 2)
    problem.factor("price", (0, 1), [Row((0, 0), (4, 0)), Row((1, 1), (3, 7))])
    for hint in ((2, 0), (1, 1), (0, 0)):
        check(problem, 0, {1: 5}, 4, solve(problem, 0, {1: 5}, hint, SECONDS))


def test_cpsat_refuses_sums_beyond_64_bits():
    problem = Problem(("a",))
    problem.variable("x", 2)
    problem.factor("price", (0,), [Row((0,), (0,)), Row((1,), (2**63 - 1,))])
    with pytest.raises(SolverError, match="cpsat refuses the problem"):
        cpsat.solve(problem, 0, {}, None, SECONDS)
    check(problem, 0, {}, 0, backtracking.solve(problem, 0, {}, None, SECONDS))


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("cap", [2**63 - 1, 2**63, 2**70])
def test_caps_beyond_64_bits(solve, cap: int):
    problem = Problem(("a", "b"))
    problem.variable("x", 2)
    problem.factor("price", (0,), [Row((0,), (3, 1)), Row((1,), (4, 0))])
    check(problem, 0, {1: cap}, 3, solve(problem, 0, {1: cap}, None, SECONDS))
    check(problem, 0, {1: -cap}, None, solve(problem, 0, {1: -cap}, None, SECONDS))


@pytest.mark.parametrize("cost", [2**62, 2**63, 2**70])
def test_costs_about_64_bits(cost: int):
    problem = Problem(("a", "b"))
    for i in range(2):
        problem.variable(f"v{i}", 2)
        problem.factor(f"price {i}", (i,), [Row((0,), (0, cost)), Row((1,), (cost, 0))])
    for solve in (lp.solve, backtracking.solve):
        check(problem, 0, {1: cost}, cost, solve(problem, 0, {1: cost}, None, SECONDS))
    for component, caps in ((0, {}), (0, {1: cost})):
        with pytest.raises(SolverError, match="cpsat refuses the problem"):
            cpsat.solve(problem, component, caps, None, SECONDS)


def test_backtracking_gives_the_same_assignment_every_time():
    problem = chain(8)
    solve = partial(backtracking.solve, problem, 1, {0: 800}, None, SECONDS)
    assert solve() == solve()


# --- finding solvers

PLUGIN = """
from itertools import product
from shardwright.planner.solvers.problem import Result

def solve(problem, component, caps, hint, seconds):
    best = None
    for values in product(*problem.domains):
        price = problem.price(values)
        if price is not None and all(price[c] <= cap for c, cap in caps.items()):
            best = min(best or (price[component], values), (price[component], values))
    return Result("infeasible", None, 0) if best is None else Result("optimal", best[1], best[0])
"""


def test_a_solver_of_another_package_is_found(tmp_path, monkeypatch):
    info = tmp_path / "tiny_solver-1.0.dist-info"
    info.mkdir()
    (tmp_path / "tiny_solver.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-solver\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardwright.solvers]\ntiny = tiny_solver:solve\n")
    assert "tiny" not in solvers.names()
    monkeypatch.syspath_prepend(tmp_path)
    assert solvers.names() == ["backtracking", "cpsat", "decompose", "lp", "tiny"]
    problem = chain(0)
    problem.factor("price", (0,), [Row((i,), (i, 9 - i)) for i in range(3)])
    solve = solvers.load("tiny")
    check(problem, 1, {0: 1}, 8, solve(problem, 1, {0: 1}, None, SECONDS))


def test_solvers_that_come_with_it():
    assert solvers.load("cpsat") is cpsat.solve
    assert solvers.load("lp") is lp.solve
    assert solvers.load("backtracking") is backtracking.solve
    with pytest.raises(UsageError, match="'abacus'; installed: backtracking, cpsat, lp"):
        solvers.load("abacus")


def test_without_ortools(monkeypatch):
    assert solvers.backup() == (lp.solve, "")
    monkeypatch.setattr(solvers, "find_spec", lambda name: None)
    found, note = solvers.backup()
    assert found is None and "OR-tools" in note
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    monkeypatch.setitem(sys.modules, "ortools.linear_solver", None)
    for solve in (cpsat.solve, lp.solve):
        with pytest.raises(SolverError, match="pip install ortools"):
            solve(Problem(("a",)), 0, {}, None, SECONDS)
