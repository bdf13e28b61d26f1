"""The checker refuses what the network forbids, and a solver that lies never makes a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright
from shardwright.errors import SolverError
from shardwright.planner import solvers
from shardwright.planner.problem.builder import BACKWARD, BYTES, TIME
from shardwright.planner.problem.optimize import optimize
from shardwright.planner.search.unfolded import agree
from shardwright.planner.solvers import backtracking
from shardwright.planner.solvers.problem import Problem, Result
from shardwright.planner.strategies.state import REPLICATED, State
from shardwright.planner.verify import check
from shardwright.planner.verify.recost import Bill
from tests import planning
from tests.planner.toys import TOYS, ColumnRow, D, Toy, Within, solutions, toy


def accepted(it: Toy, assignment: Mapping[str, State]) -> tuple[int, int, int] | None:
    """The checker's price; None where it refuses."""
    try:
        check.check(it.graph, it.states, assignment, {""})
        return Bill(it.costs, assignment).price
    except SolverError:
        return None


def claimed(it: Toy, values: tuple[int, ...]) -> tuple[int, int, int] | None:
    """The network's price; None where a factor forbids the values."""
    costs = it.network.problem.price(values)
    return None if costs is None else (costs[BYTES], costs[TIME], costs[BACKWARD])


@pytest.mark.parametrize("name", TOYS)
def test_accepts_every_solution(name: str) -> None:
    """All assignments that the network allows pass, at the network's own price."""
    it = toy(name)
    found = solutions(it.small.problem)
    for _, (chosen, costs) in zip(range(200), found, strict=False):
        assert accepted(it, it.assignment(chosen)) == (costs[BYTES], costs[TIME], costs[BACKWARD])


@settings(max_examples=120)
@given(st.sampled_from(sorted(TOYS)), st.data())
def test_agrees_on_what_is_wrong(name: str, data: st.DataObject) -> None:
    """A plan with a few states changed is refused by both or priced alike by both."""
    it = toy(name)
    domains = it.network.problem.domains
    values = list(optimize(it.small, backtracking.solve, 60, movable=it.network.movable).assignment)
    for v in data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3)):
        values[v] = data.draw(st.sampled_from(domains[v]))
    changed = tuple(values)
    assert accepted(it, it.network.assignment(changed)) == claimed(it, changed)


@pytest.mark.parametrize("name", TOYS)
def test_every_single_change(name: str) -> None:
    """Each tensor in turn, in each of its other states."""
    it = toy(name)
    best = optimize(it.small, backtracking.solve, 60, movable=it.network.movable).assignment
    for v, domain in enumerate(it.network.problem.domains):
        for value in domain:
            changed = (*best[:v], value, *best[v + 1 :])
            assert accepted(it, it.network.assignment(changed)) == claimed(it, changed)


def test_says_where() -> None:
    """The message names the op, the module and the source line."""
    it = toy("column, row")
    assignment = it.network.assignment(
        optimize(it.small, backtracking.solve, 60, movable=it.network.movable).assignment
    )
    weight = next(u.used for u in it.graph.uses if u.fqn == "inner.down.weight")
    with pytest.raises(
        SolverError, match=r"at linear in 'inner.down' \(toys.py:\d+\)|'inner.down'"
    ):
        check.check(it.graph, it.states, {**assignment, weight: REPLICATED})
    output = it.graph.outputs[0]
    with pytest.raises(SolverError):
        check.check(it.graph, it.states, {**assignment, output: State(partial=1)})


# --- solvers that lie


def shuffled(problem: Problem, component: int, *_: object) -> Result:
    """An assignment out of the blue."""
    return Result("optimal", tuple(d[-1] for d in problem.domains), 0)


def boasting(problem, component, caps, hint, seconds) -> Result:
    """A bound above what its own assignment costs."""
    found = backtracking.solve(problem, component, caps, hint, seconds)
    return found._replace(bound=found.bound + 10**9)


def worst(problem: Problem, component: int, caps, hint, seconds) -> Result:
    """The dearest assignment, as if it were the cheapest."""
    costs = {chosen: price[component] for chosen, price in solutions(problem)}
    chosen = max(costs, key=lambda c: (costs[c], c))
    return Result("optimal", chosen, costs[chosen])


def speechless(*_: object) -> Result:
    return Result("unknown", None, 0)


def plan_with(monkeypatch, solve) -> shardwright.Plan:
    monkeypatch.setattr(solvers, "load", lambda name: solve)
    x = torch.zeros(3, 19, D)
    return planning.plan(Within(ColumnRow()), tp=2, args=(x,), solver="liar")


@pytest.mark.parametrize("solve", [shuffled, worst, speechless, boasting])
def test_a_solver_that_lies_makes_no_worse_plan(monkeypatch, solve) -> None:
    """What it says is checked: an error, or the plan that an honest solver finds."""
    honest = plan_with(monkeypatch, backtracking.solve)
    try:
        plan = plan_with(monkeypatch, solve)
    except SolverError:
        return
    assert plan.modules == honest.modules
    assert plan.solver.objective == honest.solver.objective
    assert plan.solver.bound[0] <= plan.solver.objective[0]


def test_where_a_solver_runs_out_of_time_the_plan_says_so(monkeypatch) -> None:
    report = plan_with(monkeypatch, speechless).solver
    assert (report.name, report.status, report.gap) == ("backtracking", "optimal", 0)
    assert report.note == "liar ran out of time: proven with the backtracking solver"


def test_wrong_costs_are_refused() -> None:
    """The checker's own sums must be the solver's to the unit."""
    it = toy("column, row")
    optimum = optimize(it.small, backtracking.solve, 60, movable=it.network.movable)
    found = accepted(it, it.network.assignment(optimum.assignment))
    assert found is not None
    agree(found, optimum)
    for component in (BYTES, TIME, BACKWARD):
        costs = list(optimum.costs)
        costs[component] += 1
        with pytest.raises(SolverError, match="the solver claims .*the checker finds"):
            agree(found, dataclasses.replace(optimum, costs=tuple(costs)))
