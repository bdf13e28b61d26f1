"""The contest: its rows of memory, its own scorer, and a whole run on a small instance."""

from __future__ import annotations

import json
import random
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks import contest, contest_made, decompose

HUGE = 10**18


def instance(limit: int | None) -> contest.Instance:
    """Three nodes in a row, the first two of them in use together."""
    return contest.Instance(
        intervals=[(0, 2), (1, 3), (3, 3)],
        costs=[[0, 5], [0, HUGE, 7], [1]],
        usages=[[4, 1], [4, 0, 2], [99]],
        edges=[(0, 1), (0, 1), (1, 2)],
        edge_costs=[
            np.array([[1, 0, 2], [HUGE, 0, 3]]),
            np.array([[10, 0, 20], [0, 0, 30]]),
            np.array([[0], [0], [4]]),
        ],
        limit=limit,
    )


@pytest.mark.parametrize(
    ("limit", "solution", "cost"),
    [
        (None, (0, 0, 0), 12),
        (8, (0, 0, 0), 12),
        (7, (0, 0, 0), None),  # both are in use at time 1
        (7, (0, 2, 0), 34),
        (None, (1, 0, 0), None),  # an edge forbids it
        (None, (0, 1, 0), None),  # the node does
    ],
)
def test_the_scorer_counts_by_the_rules(
    limit: int | None, solution: tuple[int, ...], cost: int | None
):
    assert contest.score(instance(limit), solution) == cost
    problem = contest.problem_of(instance(limit))
    price = problem.price(solution)
    held = price is not None and problem.limits.hold(solution)
    assert (price[0] if held and price is not None else None) == cost


def test_rows_of_memory_are_enough():
    pick = random.Random(0)
    for _ in range(100):
        ends = [sorted(pick.sample(range(12), 2)) for _ in range(6)]
        intervals = [(a, b) for a, b in ends]
        intervals.append((5, 5))
        rows = contest.moments(intervals)
        amounts = [pick.randint(0, 9) for _ in intervals]

        def used(t: int, intervals=intervals, amounts=amounts) -> int:
            return sum(m for (a, b), m in zip(intervals, amounts, strict=True) if a <= t < b)

        assert max(map(used, rows)) == max(map(used, range(12)))


def test_made_instances_are_the_same_for_a_seed_and_solved(tmp_path: Path):
    made = contest_made.make(120, 5)
    assert made == contest_made.make(120, 5) != contest_made.make(120, 6)
    path = tmp_path / "made.json"
    path.write_text(json.dumps(made))
    how = contest.How(8, 1, 0, tmp_path / "out")
    line = contest.run(path, how)
    assert "optimal" in line or "feasible" in line, line
    solution = json.loads((tmp_path / "out" / "made.json").read_text())["solution"]
    assert contest.score(contest.read(path), solution) is not None


def test_a_small_instance_is_solved_to_the_optimum():
    for limit in (None, 8, 7, 5, 3):
        own = instance(limit)
        costs = [contest.score(own, x) for x in product(range(2), range(3), range(1))]
        best = min((c for c in costs if c is not None), default=None)
        result = contest.How(None, 1, 0, None).solve(contest.problem_of(own), 20)
        assert (result.status == "infeasible") == (best is None)
        assert best is None or (result.status, result.bound) == ("optimal", best)


def test_the_solver_ends_when_its_clock_says_so(monkeypatch: pytest.MonkeyPatch):
    """Each look at the clock takes a second: it is looked at often, and not long after the end."""
    made = contest_made.make(400, 3)["problem"]
    own = contest.parsed(made)
    looks: list[float] = []

    def clock() -> float:
        looks.append(float(len(looks)))
        return looks[-1]

    problem = contest.problem_of(own)
    monkeypatch.setattr(time, "monotonic", clock)
    result = decompose.solve(problem, 0, {}, None, 40, 1)
    assert result.status != "optimal", "nothing would be left to do"
    assert 40 <= looks[-1] < 60
