"""Solvers on problems made by hand, and how solvers are found."""

from itertools import product

import pytest

from shardwright.errors import SolverError, UsageError
from shardwright.planner import solvers
from shardwright.planner.solvers import backtracking, cpsat
from shardwright.planner.solvers.presolve import presolve
from shardwright.planner.solvers.problem import Problem, Row
from tests.planner.problems import SECONDS, SOLVERS, check
from tests.planner.test_chains import chain


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


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_hint_need_not_be_feasible(solve):
    problem = Problem(("a", "b"))
    problem.variable("x", 3)
    problem.variable("y", 2)
    problem.factor("price", (0, 1), [Row((0, 0), (4, 0)), Row((1, 1), (3, 7))])
    for hint in ((2, 0), (1, 1), (0, 0)):
        check(problem, 0, {1: 5}, 4, solve(problem, 0, {1: 5}, hint, SECONDS))


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
    assert solvers.names() == ["backtracking", "cpsat", "tiny"]
    problem = chain(0)
    problem.factor("price", (0,), [Row((i,), (i, 9 - i)) for i in range(3)])
    solve = solvers.load("tiny")
    check(problem, 1, {0: 1}, 8, solve(problem, 1, {0: 1}, None, SECONDS))


def test_solvers_that_come_with_it():
    assert solvers.load("cpsat") is cpsat.solve
    assert solvers.load("backtracking") is backtracking.solve
    with pytest.raises(UsageError, match="'abacus'; installed: backtracking, cpsat"):
        solvers.load("abacus")


def test_the_linear_relaxation_is_gone():
    with pytest.warns(DeprecationWarning, match="'lp' is gone: 'cpsat' is used"):
        assert solvers.current("lp") == "cpsat"
    assert [solvers.current(n) for n in (None, "tiny")] == ["cpsat", "tiny"]


def test_backtracking_takes_one_cap():
    problem = Problem(("a", "b", "c"))
    with pytest.raises(SolverError, match="takes one cap: use --solver cpsat"):
        backtracking.solve(problem, 0, {1: 1, 2: 1}, None, SECONDS)


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_variable_without_values(solve):
    problem = Problem(("a",))
    problem.variable("x", 0)
    problem.variable("y", 2)
    check(problem, 0, {}, None, solve(problem, 0, {}, None, SECONDS))


def test_an_answer_that_is_none_is_refused():
    problem = Problem(("a",))
    problem.variable("x", 2)
    for answer in ((), (0, 0)):
        with pytest.raises(SolverError, match="its problem forbids"):
            problem.accept(answer)
