"""The CP-SAT model: integers for parts, which alone say what the solution is."""

from itertools import product

import pytest
from ortools.sat.python import cp_model

from shardwright.errors import SolverError
from shardwright.planner.problem.objective import BYTE_PRICES, question
from shardwright.planner.solvers import backtracking, cpsat
from shardwright.planner.solvers.cpsat import minimise
from shardwright.planner.solvers.cpsat.model import PartModel
from shardwright.planner.solvers.problem import Part, Problem, Row
from tests.planner.problems import SECONDS, check
from tests.planner.toys import TOYS, toy


def gates() -> Problem:
    """Two variables of two parts each; the dearest rows are those that most would take."""
    problem = Problem(("a",))
    for name in "xy":
        axis, partial = Part(f"{name}[0]", (0, 3, 1, 0)), Part(f"{name} partial", (0, 0, 2, 1))
        problem.variable(name, 4, (axis, partial))
    rows = [Row((i, j), ((5 * i + 3 * j) % 7,)) for i, j in product(range(4), repeat=2) if i != j]
    problem.factor("f", (0, 1), rows)
    return problem


def test_the_solution_is_what_the_integers_say():
    """Whatever literals are: each assignment is read from the values of its parts."""
    problem = gates()
    model = PartModel(problem)
    assert [[i.name for i in integers] for integers in model.parts] == [
        ["x[0]", "x partial"],
        ["y[0]", "y partial"],
    ]
    for assignment in product(range(4), repeat=2):
        said = {
            integer.name: part.values[value]
            for parts, integers, value in zip(problem.parts, model.parts, assignment, strict=True)
            for part, integer in zip(parts, integers, strict=True)
        }
        assert model.read(lambda integer, said=said: said[integer.name]) == assignment


@pytest.mark.parametrize("name", TOYS)
def test_integers_leave_nothing_open(name: str) -> None:
    """With the parts of a plan fixed CP-SAT finds that plan, at its costs, and no other."""
    it = toy(name)
    problem = question(it.network.problem, BYTE_PRICES.start, False)
    best = cpsat.solve(problem, 0, {}, None, SECONDS)
    assert best.assignment is not None
    model = PartModel(problem)
    for parts, integers, value in zip(problem.parts, model.parts, best.assignment, strict=True):
        for part, integer in zip(parts, integers, strict=True):
            model.model.add(integer == part.values[value])
    solver = cp_model.CpSolver()
    assert solver.solve(model.model) == cp_model.OPTIMAL
    assert model.read(solver.value) == best.assignment
    for literals, value in zip(model.values, best.assignment, strict=True):
        assert [x for x, literal in literals.items() if solver.value(literal)] == [value]


def test_parts_that_do_not_tell_values_apart_are_refused():
    problem = Problem(("a",))
    problem.variable("x", 2, (Part("x[0]", (1, 1)),))
    with pytest.raises(SolverError, match="two values of 'x' have the same parts"):
        cpsat.solve(problem, 0, {}, None, SECONDS)


def test_the_text_is_a_model_with_the_same_optimum():
    problem = gates()
    problem.factor("x", (0,), [Row((i,), (2**9 - i,)) for i in range(4)])
    best = cpsat.solve(problem, 0, {}, None, SECONDS)
    read = cp_model.CpModel()
    text = cpsat.as_text(problem, 0, {})
    assert read.proto.parse_text_format(text)
    solver = cp_model.CpSolver()
    assert solver.solve(read) == cp_model.OPTIMAL
    assert round(solver.objective_value) == best.bound - 2**9 + 3  # what all pay is left out
    for name in ("x[0]", "x partial", "y[0]", "y partial"):
        assert f'name: "{name}"' in text


def test_without_elimination_hint_or_bound_every_toy_is_proven():
    for name in TOYS:
        it = toy(name)
        for problem in (it.network.problem, it.small.problem):
            problem = question(problem, BYTE_PRICES.start, False)
            best = backtracking.solve(problem, 0, {}, None, SECONDS)
            check(problem, 0, {}, best.bound, cpsat.solve(problem, 0, {}, None, SECONDS))


def test_what_breaks_ties_never_decides_more():
    for name in TOYS:
        for price in (BYTE_PRICES.start, BYTE_PRICES[-1]):
            problem = question(toy(name).network.problem, price, False)
            rests = (max(r.costs[0] % problem.ties for r in f.rows) for f in problem.factors)
            assert 0 < sum(rests) < problem.ties


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
        monkeypatch.setattr(minimise, "WORKERS", workers)
        results.add(cpsat.solve(problem, 0, {}, None, SECONDS))
    assert results == {backtracking.solve(problem, 0, {}, None, SECONDS)}
