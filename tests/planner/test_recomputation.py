"""Blocks that are computed again in the backward pass: the choice, its price, and its numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from benchmarks.compare import Comparison, compare, predicted, reference
from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.recomputed_memory import least_while_computed_again
from shardwright.planner.devices.device import FOLDER
from shardwright.planner.search import solution
from shardwright.planner.strategies.state import State
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.modules.recomputation import recompute_blocks
from tests import planning, zoo
from tests.marks import long
from tests.ranks import run_ranks

TRAINING: dict[str, Any] = {"phase": "train", "batch": 4, "seq": 64}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def llama(layers: int = 3) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": layers})
    return AutoModelForCausalLM.from_config(config).double()


def mixture() -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4)
    model = AutoModelForCausalLM.from_config(config).double()
    model.set_experts_implementation("eager")
    return model


def inputs() -> dict[str, Any]:
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "use_cache": False}


def assert_gradients(model: Any, how: dict[str, Any], near: float) -> Plan:
    """Return the plan, with which gradients are the unsharded model's, collectives as predicted."""
    plan = planning.plan(model, **how, **TRAINING)
    given = inputs()
    expected = dataclasses.replace(reference(model, given), decode=None)  # caches are off then

    def work(mesh: Mesh) -> Comparison:
        return compare(model, given, plan, mesh, expected)

    for found in run_ranks(plan.world_size, work, plan.mesh):
        assert found.logits <= 1e-9
        assert found.gradients is not None and found.gradients <= near, found.worst
        assert predicted(plan) == {
            "forward": dict(found.forward),
            "backward": dict(found.backward),
        }
    return plan


@pytest.mark.parametrize("mesh", [long({"ep": 2, "tp": 1}), {"ep": 2, "tp": 2}])
def test_with_experts_that_are_spread(mesh: dict[str, int]) -> None:
    assert_gradients(mixture().train(), {"mesh": mesh, "recompute": True}, 1e-6)


@pytest.mark.parametrize("how", [{"sequence_parallel": True}, {"mesh": {"cp": 2, "tp": 2}}])
def test_with_shards_of_sequences(how: dict[str, Any]) -> None:
    mesh = how.get("mesh", {"tp": 2})
    assert_gradients(llama().train(), {"mesh": mesh, "recompute": True, **how}, 1e-9)


SOME = {"model.layers": 2}


@pytest.mark.parametrize(
    ("make", "near", "how"),
    [(llama, 1e-9, SOME), (mixture, 1e-6, True)]  # float32 router
    + [long(llama, 1e-9, True), long(mixture, 1e-6, SOME)],
)
def test_gradients_and_collectives(make: Any, near: float, how: Any) -> None:
    model = make().train()
    plan = assert_gradients(model, {"mesh": {"tp": 2}, "recompute": how}, near)
    layers = len(model.model.layers)
    assert plan.workload.recomputed == {"model.layers": layers if how is True else 2}


def counts(model: Any, mesh: dict[str, int], shares: Sequence[float]) -> list[int]:
    """Return how many blocks are computed again with so much of the memory that may be missing."""
    how: dict[str, Any] = {"mesh": mesh, **TRAINING}

    def held(plan: Plan) -> int:
        assert plan.predicted.memory is not None
        return plan.predicted.memory.total

    most, least = (held(planning.plan(model, recompute=each, **how)) for each in (False, True))
    rooms = [int(least + (most - least) * share) for share in shares]
    plans = [planning.plan(model, memory=room, **how) for room in rooms]
    assert all(held(plan) <= room for plan, room in zip(plans, rooms, strict=True))
    return [plan.workload.recomputed.get("model.layers", 0) for plan in plans]


@pytest.mark.parametrize(
    ("layers", "shares"), [(3, (1.0, 0.5, 0.0)), long(6, (1.0, 0.8, 0.4, 0.0))]
)
def test_as_many_blocks_as_needed(layers: int, shares: Sequence[float]) -> None:
    found = counts(llama(layers), {"tp": 2}, shares)
    assert found == sorted({*found})
    assert (found[0], found[-1]) == (0, layers)


def test_fewer_blocks_are_not_slower(tmp_path: Path) -> None:
    """The placements with which one block less fits may take longer than that block."""
    small = json.loads((FOLDER / "l4-pcie.json").read_text()) | {"memory_bytes": 12_680_816}
    (tmp_path / "small.json").write_text(json.dumps(small))
    how: Any = {"objective": "time", "phase": "train", "batch": 16, "seq": 64}
    how["device"] = str(tmp_path / "small.json")
    model = zoo.build("nemotron_h")[1]
    every, found = (planning.plan(model, 2, recompute=all_of, **how) for all_of in (True, None))
    assert found.predicted.time_ns <= every.predicted.time_ns


@pytest.mark.long
def test_as_many_blocks_as_needed_around_spread_experts() -> None:
    assert counts(mixture(), {"ep": 2, "tp": 1}, (0.6,)) in ([1], [2])


@pytest.mark.parametrize("make", [llama, mixture])
@pytest.mark.parametrize(
    ("mesh", "sp"), [({"tp": 1}, False), ({"tp": 4}, False), ({"tp": 2}, True)]
)
def test_the_fewest_bytes_of_a_block(
    monkeypatch: pytest.MonkeyPatch, make: Any, mesh: dict[str, int], sp: bool
) -> None:
    """What a block keeps while it is computed again is no more than its plan has."""
    bounds: list[int] = []

    def bounded(costs: Costs, left: Mapping[str, Sequence[State]]) -> int:
        held, again = costs.holdings, least_while_computed_again(costs, left)
        kept = (min(held.bytes(n, state) for state in left[n]) for n in held.others)
        bounds.extend((again, sum(kept)))
        return again

    monkeypatch.setattr(solution, "least_while_computed_again", bounded)
    how = {"mesh": mesh, "sequence_parallel": sp, "recompute": True, **TRAINING}
    held = planning.plan(make(), **how).predicted.memory
    assert held is not None and all(bounds) and sum(bounds) <= held.activations
    assert mesh["tp"] > 1 or sum(bounds) >= 0.75 * held.activations  # the rest are logits


def test_a_block_that_cannot_fit_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = Mock(wraps=solution.optimize)
    monkeypatch.setattr(solution, "optimize", solved)
    model = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    how = {"mesh": {"tp": 1}, "device": "l4-pcie", "recompute": True, "phase": "train"}
    plan = planning.plan(model, **how, batch=16, seq=2**16)
    assert solved.call_count == 1 and solved.call_args.kwargs["objective"] == "memory"
    assert plan.objective.name == "memory"


def test_a_list_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="'model.layer' is no list of so many blocks"):
        planning.plan(llama(), 2, recompute={"model.layer": 2}, **TRAINING)
    with pytest.raises(PlanError, match="'model.layers' has 6 blocks that can be .*, not 7"):
        recompute_blocks(llama(6), {"model.layers": 7})
