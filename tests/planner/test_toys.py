"""Whole networks of small graphs: all solvers against trying every assignment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from shardwright.errors import InfeasibleError
from shardwright.planner.problem.builder import ACTIONS, BACKWARD, BYTES, COMPONENTS, TIE, TIME
from shardwright.planner.problem.objective import BYTE_PRICES, primary
from shardwright.planner.problem.optimize import SLACK, Optimum, optimize
from shardwright.planner.solvers import backtracking, cpsat
from shardwright.planner.solvers.presolve import presolve
from shardwright.planner.solvers.problem import CostVector, Problem, Row
from shardwright.planner.strategies.state import REPLICATED
from shardwright.planner.verify import check
from shardwright.planner.verify.recost import Bill
from tests.planner.toys import TOYS, Toy, solutions, toy

MODULES = (cpsat, backtracking)
SOLVERS = [pytest.param(m.solve, id=m.__name__.rpartition(".")[2]) for m in MODULES]
SECONDS = 60.0


@cache
def every(name: str) -> list[tuple[tuple[int, ...], CostVector]]:
    """All solutions of a toy, with their costs."""
    return list(solutions(toy(name).small.problem))


def least(name: str, component: int) -> int:
    return min(costs[component] for _, costs in every(name))


def best(name: str, value: Callable[[CostVector], Any], memory: int | None = None) -> tuple:
    """The least `value` of costs within `memory`, and all assignments that have it."""
    found = [
        (value(costs), chosen)
        for chosen, costs in every(name)
        if memory is None or costs[BYTES] <= memory
    ]
    lowest = min(cost for cost, _ in found)
    return lowest, [chosen for cost, chosen in found if cost == lowest]


def rank(costs: CostVector, price: int) -> CostVector:
    """What is compared, digit by digit."""
    return primary(costs, price), costs[ACTIONS], costs[TIE]


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("component", [BYTES, TIME, BACKWARD])
@pytest.mark.parametrize("solve", SOLVERS)
def test_each_component_alone(name: str, component: int, solve) -> None:
    """The proven least of bytes and of each time is that of trying everything."""
    problem = toy(name).small.problem
    result = solve(problem, component, {}, None, SECONDS)
    want = least(name, component)
    assert (result.status, result.bound) == ("optimal", want)
    price = problem.price(result.assignment)
    assert price is not None and price[component] == want


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("name", TOYS)
def test_the_plan_is_the_best_of_all(name: str, solve) -> None:
    """Objective, bound, assignment: all as trying everything says, ties broken by name alike."""
    it = toy(name)
    optimum = optimize(it.small, solve, SECONDS, movable=it.network.movable)
    lowest, chosen = best(name, lambda c: rank(c, optimum.byte_price))
    assert optimum.optimal
    assert optimum.objective == optimum.bound == lowest[0]
    assert [optimum.assignment] == [it.small.expand(c) for c in chosen]
    assert optimum.costs == it.network.problem.price(optimum.assignment)
    assert optimum.costs[BYTES] <= (1 + SLACK) * least(name, BYTES)


@pytest.mark.parametrize("name", [n for n in TOYS if n != "parallel"])
def test_no_smaller_price_of_a_byte_would_do(name: str) -> None:
    """At half the price, no best plan keeps to the slack."""
    it = toy(name)
    optimum = optimize(it.small, backtracking.solve, SECONDS, movable=it.network.movable)
    if optimum.byte_price > BYTE_PRICES.start:
        _, chosen = best(name, lambda c: primary(c, optimum.byte_price - 1))
        sizes = [price[BYTES] for c in chosen if (price := it.small.problem.price(c))]
        assert max(sizes) > least(name, BYTES)


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("name", [n for n in TOYS if n != "parallel"])
def test_within_a_budget(name: str, solve) -> None:
    """The fastest plan that fits, for budgets from the least to everything."""
    it = toy(name)
    sizes = sorted({costs[BYTES] for _, costs in every(name)})
    for memory in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        optimum = optimize(it.small, solve, SECONDS, memory, movable=it.network.movable)
        lowest, chosen = best(name, lambda c: rank(c, BYTE_PRICES.start), memory)
        assert (optimum.objective, optimum.bound, optimum.optimal) == (lowest[0], lowest[0], True)
        assert optimum.assignment in [it.small.expand(c) for c in chosen]
        assert optimum.costs[BYTES] <= memory


@pytest.mark.parametrize("solve", SOLVERS)
def test_below_the_least(solve) -> None:
    """The error says the least that would fit, and that does fit."""
    it, floor = toy("column, row"), least("column, row", BYTES)
    with pytest.raises(InfeasibleError, match=f"the least that would fit is {floor:,} bytes"):
        optimize(it.small, solve, SECONDS, floor - 1, movable=it.network.movable)
    assert (
        optimize(it.small, solve, SECONDS, floor, movable=it.network.movable).costs[BYTES] == floor
    )


def test_rules_that_contradict_each_other() -> None:
    """One op wants its tensors equal, another wants them different."""
    problem = Problem(COMPONENTS)
    a, b = problem.variable("a", 2), problem.variable("b", 2)
    free = (0,) * len(COMPONENTS)
    problem.factor("equal", [a, b], [Row((i, i), free) for i in range(2)])
    problem.factor("different", [a, b], [Row((i, 1 - i), free) for i in range(2)])
    assert list(solutions(problem)) == []
    assert presolve(problem) is None
    for solver in MODULES:
        assert solver.solve(problem, 0, {}, None, SECONDS).status == "infeasible"


@pytest.mark.parametrize("name", [n for n in TOYS if n != "parallel"])
def test_presolve_loses_no_plan(name: str) -> None:
    """As many solutions as the whole network has, at the same costs."""
    it = toy(name)
    whole = dict(solutions(it.network.problem))
    assert {it.small.expand(c): costs for c, costs in every(name)} == whole


# --- the plans that everyone knows


def planned(name: str) -> tuple[Toy, Optimum]:
    it = toy(name)
    optimum = optimize(it.small, backtracking.solve, SECONDS, movable=it.network.movable)
    assignment = it.network.assignment(optimum.assignment)
    check.check(it.graph, it.states, assignment)
    found = Bill(it.costs, assignment).price
    assert found == tuple(optimum.costs[c] for c in (BYTES, TIME, BACKWARD))
    return it, optimum


def kinds(it: Toy, optimum: Optimum) -> tuple[Counter[str], Counter[str]]:
    """How often each kind of collective is called, forward and backward."""
    bill = Bill(it.costs, it.network.assignment(optimum.assignment))
    forward, backward = (Counter(c.kind for c in calls.elements()) for calls in bill.collectives())
    return forward, backward


def cut(it: Toy, optimum: Optimum) -> dict[str, set[int]]:
    """Parameter -> the dims that are split."""
    assignment = it.network.assignment(optimum.assignment)
    return {
        u.fqn.removeprefix("inner."): {d for d, *_ in assignment[u.stored].shards}
        for u in it.graph.uses
    }


@pytest.mark.parametrize("name", TOYS)
def test_the_checker_agrees(name: str) -> None:
    planned(name)


@pytest.mark.parametrize("name", ["column, row", "fused", "residual"])
def test_column_then_row(name: str) -> None:
    """One all-reduce forward, one backward, and only the last bias stays replicated."""
    it, optimum = planned(name)
    assert kinds(it, optimum) == (Counter(all_reduce=1), Counter(all_reduce=1))
    split = {n.rpartition("mlp.")[2]: dims for n, dims in cut(it, optimum).items() if dims}
    assert split == {"up.weight": {0}, "up.bias": {0}, "down.weight": {1}}


def test_a_conflict_is_gathered() -> None:
    """Softmax needs all features: a gather before it, and both matrices split all the same."""
    it, optimum = planned("conflict")
    assignment = it.network.assignment(optimum.assignment)
    softmax = next(op for op in it.graph.ops if "softmax" in op.call.op)
    assert not any(assignment[n].shards for n in (*softmax.inputs, *softmax.outputs))
    assert kinds(it, optimum)[0]["all_gather"] >= 1
    assert kinds(it, optimum)[0]["all_reduce"] == 0
    assert all(cut(it, optimum).values())


def test_branches_share_their_all_reduces() -> None:
    """Two branches are added before the sum over ranks, and split one copy of their input."""
    it, optimum = planned("parallel")
    assert all(cut(it, optimum).values())
    assert kinds(it, optimum)[0].total() <= 2


def test_a_module_called_twice_does_the_same_twice() -> None:
    it, optimum = planned("twice")
    assert kinds(it, optimum)[0] == Counter(all_reduce=2)
    assert kinds(it, optimum)[1] == Counter(all_reduce=2)


def test_a_tied_matrix_is_split_once() -> None:
    """Embedding and head hold the same rows."""
    it, optimum = planned("tied")
    split = cut(it, optimum)
    assert split["words.weight"] == split["head.weight"] != set()
    assert len({u.stored for u in it.graph.uses}) == 1


def test_unequal_parts_are_each_split() -> None:
    it, optimum = planned("unequal")
    assert cut(it, optimum) == {"a.weight": {0}, "b.weight": {0}, "o.weight": {1}}
    assert kinds(it, optimum) == (Counter(all_reduce=1), Counter(all_reduce=1))


def test_a_chain_needs_no_gather_between_column_and_row() -> None:
    it, optimum = planned("chain")
    assert all(cut(it, optimum).values())


@pytest.mark.parametrize("name", TOYS)
def test_outputs_and_inputs_are_whole(name: str) -> None:
    it, optimum = planned(name)
    assignment = it.network.assignment(optimum.assignment)
    assert all(assignment[n] == REPLICATED for n in (*it.graph.inputs, *it.graph.outputs))
    for op in it.graph.ops:
        if "softmax" in op.call.op or "relu" in op.call.op:
            assert not any(assignment[n].partial for n in op.inputs)
