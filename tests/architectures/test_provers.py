"""All solvers prove the same plan of every architecture of the first milestone."""

from __future__ import annotations

import pytest
import torch

from benchmarks.zoo import FIRST
from benchmarks.zoo_case import build
from shardwright.planner.problem.objective import question
from shardwright.planner.problem.optimize import optimize
from shardwright.planner.search import solution
from shardwright.planner.solvers import backtracking, cpsat
from shardwright.planner.solvers.presolve import Presolved
from tests import planning
from tests.marks import long

USUAL = {"bloom", "cohere", "gemma2", "gpt2", "phi3", "bert", "t5"}
CASES = [
    (kind, name) if name in USUAL else long(kind, name) for kind, n in FIRST.items() for name in n
]
SECONDS = 60.0


class Found(Exception):
    """The problem that planning came to."""


def network(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Presolved, int]:
    """The problem of splitting a model over two ranks, and the bytes that could be split."""

    def stop(small: Presolved, *_: object, movable: int, **_how: object) -> None:
        raise Found(small, movable)

    _, model = build(kind, name, torch.float32)
    with monkeypatch.context() as patch, pytest.raises(Found) as found:
        patch.setattr(solution, "optimize", stop)
        planning.plan(model, tp=2)
    small, movable = found.value.args
    return small, movable


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_all_solvers_prove_the_same_plan(kind: str, name: str, monkeypatch) -> None:
    small, movable = network(kind, name, monkeypatch)
    found = [optimize(small, m.solve, SECONDS, movable=movable) for m in (cpsat, backtracking)]
    for optimum in found:
        assert optimum.optimal and optimum.objective == optimum.bound
        assert optimum.assignment == found[0].assignment
    assert [optimum.proven() for optimum in found] == [True, False]
    assert not any(optimum.better for optimum in found)  # than what elimination found
    # Without a hint too: ties are broken by the objective, not by what a solver was told.
    problem = question(small.problem, found[0].byte_price, False)
    results = [m.solve(problem, 0, {}, None, SECONDS) for m in (cpsat, backtracking)]
    assert results[0].status == "optimal"
    assert results == results[:1] * 2
