"""What is to be least: time, with bytes priced by the room that they take, or memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright
from benchmarks.planning_models import MODELS
from shardwright.errors import InfeasibleError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.devices.device import FOLDER
from shardwright.planner.problem.builder import ACTIONS, BYTES, COMPONENTS, TIE, TIME
from shardwright.planner.problem.objective import BYTE_PRICES, primary
from shardwright.planner.problem.optimize import optimize
from shardwright.planner.solvers import backtracking
from shardwright.planner.solvers.presolve import presolve
from shardwright.planner.solvers.problem import Problem, Row
from tests import zoo
from tests.planner.test_toys import SECONDS, SOLVERS, every, least
from tests.planner.toys import TOYS, toy

GB = 10**9
TESTS = Path(__file__).parents[1]


# --- the price of a byte


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("name", [n for n in TOYS if n != "parallel"])
def test_the_price_is_time_over_room(name: str, solve: Any) -> None:
    """Next above T / (M - W) of the plan, which is the best of all at that price, and within M."""
    it, floor = toy(name), least(name, BYTES)
    for memory in (floor, floor + 1, 2 * floor, 80 * GB):
        found = optimize(it.small, solve, SECONDS, memory, movable=0, objective="time")
        price, costs = found.byte_price, found.costs
        assert costs[BYTES] <= memory
        left, spent = memory - costs[BYTES], primary((0, *costs[1:]), 0)
        if price < BYTE_PRICES[-1]:
            assert left * 2.0**price >= spent
            assert price == BYTE_PRICES.start or left * 2.0 ** (price - 1) < spent
        ranked = [(primary(c, price), c[ACTIONS], c[TIE]) for _, c in every(name)
                  if c[BYTES] <= memory]  # fmt: skip
        assert (primary(costs, price), costs[ACTIONS], costs[TIE]) == min(ranked)
        assert found.optimal and found.bound == found.objective


def choice(*options: tuple[int, int]) -> Problem:
    """One variable, whose values hold so many bytes and take so many nanoseconds."""
    problem = Problem(COMPONENTS)
    held = problem.variable("weight", len(options))
    costs = [{BYTES: size, TIME: time} for size, time in options]
    rows = [Row((i,), tuple(c.get(k, 0) for k in range(len(COMPONENTS))))
            for i, c in enumerate(costs)]  # fmt: skip
    problem.factor("price", [held], rows)
    return problem


@pytest.mark.parametrize(
    ("split", "whole", "memory", "taken"),
    [
        ((GB // 2, 1_003_000), (4 * GB, 1_000_000), 80 * GB, 0),  # 4 GB for 3 us of a millisecond
        ((GB // 2, 1_003_000), (4 * GB, 500_000), 80 * GB, 1),  # for half of it
        ((GB // 2, 1_003_000), (4 * GB, 500_000), 5 * GB, 0),  # but not where that is nearly all
        ((2**19, 34_000_000), (2**19 + 2**20 * 24, 32_900_000), 80 * GB, 1),  # 24 MiB for 1.1 ms
    ],
)
def test_bytes_for_time(
    split: tuple[int, int], whole: tuple[int, int], memory: int, taken: int
) -> None:
    small = presolve(choice(split, whole))
    assert small is not None
    found = optimize(small, backtracking.solve, SECONDS, memory, movable=0, objective="time")
    assert found.assignment == (taken,)


# --- plans


class Mlp(nn.Module):
    """16 MB, which take less time to be read whole than a collective has latency."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((512, 4096), (4096, 512)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def mlp(**options: Any) -> Plan:
    with torch.device("meta"):
        model = Mlp()
    return shardwright.plan(model, 8, args=(torch.zeros(3, 19, 512),), seq=19, **options)


def profile(path: Path, memory: int) -> str:
    """A device like another, with so much memory."""
    data = json.loads((FOLDER / "h100-nvlink.json").read_text())
    path.write_text(json.dumps(data | {"memory_bytes": memory}))
    return str(path)


def held(plan: Plan) -> int:
    assert plan.predicted.memory is not None
    return plan.predicted.memory.total


def test_a_large_matrix_is_whole_only_where_there_is_room(tmp_path: Path) -> None:
    """The same model on a large and on a small device."""
    large, small = mlp(), mlp(device=profile(tmp_path / "small.json", 20_000_000))
    assert not large.modules and small.modules
    assert large.predicted.time_ns < small.predicted.time_ns
    assert held(small) <= 20_000_000 and not small.solver.note
    assert (large.objective.name, large.objective.memory_bytes) == ("time", 80 * GB)
    assert mlp(memory=20_000_000).modules == small.modules


def test_beyond_the_device(tmp_path: Path) -> None:
    """Where nothing fits it, the plan is that for least memory, and says so; a budget refuses."""
    found = mlp(device=profile(tmp_path / "tiny.json", 1_000_000))
    wanted = mlp(objective="memory")
    assert found.modules == wanted.modules and found.objective == wanted.objective
    assert found.solver.note.startswith("planned for least memory: no plan was found that fits")
    assert not wanted.solver.note
    with pytest.raises(InfeasibleError, match="no plan fits 1,000,000 bytes a rank"):
        mlp(memory=1_000_000)


def test_no_plan_is_past_what_a_rank_may_hold() -> None:
    model = zoo.build("llama")[1]
    with pytest.raises(InfeasibleError) as error:
        shardwright.plan(model, 2, memory=1, sequence_parallel=False)
    floor = int(str(error.value).split("would fit is ")[1].split()[0].replace(",", ""))
    free = held(shardwright.plan(model, 2, objective="time"))
    for memory in (floor, (floor + free) // 2, free):
        found = shardwright.plan(model, 2, memory=memory, sequence_parallel=False)
        assert held(found) <= memory == found.objective.memory_bytes


def test_few_key_heads_are_shared_by_ranks() -> None:
    """8 of them on 32 ranks: more bytes, fewer collectives, and less time."""
    config, load = MODELS["llama-8b"].config(2), {"batch": 8, "phase": "decode"}
    config.vocab_size = 128
    quick = shardwright.plan(config, 32, **load)
    small = shardwright.plan(config, 32, objective="memory", **load)
    calls = [sum(c.count for c in p.predicted.collectives if c.phase == "forward")
             for p in (quick, small)]  # fmt: skip
    assert calls[0] < calls[1]
    assert quick.predicted.time_ns < small.predicted.time_ns
    assert held(small) < held(quick) < 1.2 * held(small)
    entry = quick.module("model.layers.*.self_attn.k_proj")
    assert entry is not None and entry.parameters["weight"].placement == "8@tp.0*128, 4096"


def test_provers_agree() -> None:
    """And two runs of one, to the byte."""
    model = MODELS["llama-8b"].config(1)
    found = [
        shardwright.plan(model, 32, batch=8, solver=s)
        for s in ("backtracking", "cpsat", "backtracking")
    ]
    assert found[0].to_json() == found[2].to_json()
    one, other = ((p.modules, p.predicted, p.objective, p.solver.objective) for p in found[:2])
    assert one == other


def test_only_these_two() -> None:
    with pytest.raises(UsageError, match="^objective must be 'time' or 'memory', not 'speed'$"):
        mlp(objective="speed")


def test_tests_say_what_is_to_be_least() -> None:
    """For least time small models stay whole, and tests of splits would say nothing."""
    meshes = ("planner/test_meshes.py", "planner/test_meshes_by_hand.py")
    others = ("planning.py", "cli/test_errors.py", *meshes)
    here = {Path(__file__), *(TESTS / name for name in others)}
    found = [
        path.name
        for path in TESTS.rglob("*.py")
        if path not in here and re.search(r"shardwright\.plan\(", path.read_text())
    ]
    assert not found, "they should call tests.planning.plan"
