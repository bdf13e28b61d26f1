"""Ranks that differ: parts in a ratio, what a rank holds, and plans that fit only so."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import shardwright
from benchmarks.zoo_case import build
from shardwright.errors import InfeasibleError, PlanError, UsageError
from shardwright.planner.contract.dims import apportioned, local_ranges
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh
from tests import planning, zoo
from tests.equal import assert_equal_to_the_whole
from tests.marks import long
from tests.planning import as_text
from tests.ranks import run_ranks

CONFIG = transformers.LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=16,
    num_key_value_heads=8, vocab_size=32000, architectures=["LlamaForCausalLM"],
    dtype=torch.bfloat16,
)  # fmt: skip


@given(st.integers(0, 5000), st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_parts_are_within_one_of_the_exact_share(size: int, weights: list[int]) -> None:
    parts = apportioned(size, weights)
    assert sum(parts) == size and min(parts) >= 0
    exact = [size * w / sum(weights) for w in weights]
    assert all(abs(a - b) < 1 for a, b in zip(parts, exact, strict=True))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.integers(1, 4))
def test_ranks_hold_all_indices_once(parts: list[int], minor: int) -> None:
    text = f"{sum(parts)}@tp:{':'.join(map(str, parts))}*{minor}"
    (dim,) = parse(text).dims
    assert str(dim) == text
    held = [
        n
        for rank in range(len(parts))
        for a, b in local_ranges(dim, {"tp": (rank, len(parts))})
        for n in range(a, b)
    ]
    assert held == [*range(sum(parts) * minor)]


@pytest.mark.parametrize("text", ["8@tp:4:5", "8:4:4", "?@tp:4:4", "8@tp:", "8@tp:4:x"])
def test_shares_that_cannot_be(text: str) -> None:
    with pytest.raises(PlanError, match="cannot read placement"):
        parse(text)


def test_as_many_shares_as_ranks() -> None:
    plan = planned(speeds=(2, 1))
    text = plan.to_json().replace("8@tp:5:3", "8@tp:5:2:1")
    with pytest.raises(PlanError, match="3 shares of 2 ranks"):
        Plan.from_json(text)


@cache
def planned(**how: Any) -> Plan:
    ranks = len(how.get("speeds") or how["memory"])
    return planning.plan(CONFIG, tp=ranks, seq=256, **how)


def placement(plan: Plan, name: str) -> str:
    entry = plan.parameter(name)
    assert entry is not None
    return entry.placement


QUERY, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


def test_faster_ranks_get_larger_parts() -> None:
    """With equal parts the slow rank takes twice as long for its third; with these, 3/5 of that."""
    plan, even = planned(speeds=(1, 1, 0.5)), planning.plan(CONFIG, tp=3, seq=256)
    assert plan.workload.shares == [2, 2, 1]
    assert placement(plan, QUERY) == "8@tp:3:3:2*256, 2048"
    assert placement(plan, UP) == "8192@tp:3277:3277:1638, 2048"
    assert plan.predicted.time_ns < 0.95 * 2 * even.predicted.time_ns
    alike = planned(speeds=(1, 1, 1))
    assert "shares" not in alike.to_json() and alike.modules == even.modules


def test_equal_parts_where_they_fit() -> None:
    plan = planned(memory=(300_000_000, 200_000_000, 200_000_000))
    assert (plan.workload.shares, plan.predicted.memory_by_rank) == ([], [])
    assert plan.objective.memory_bytes == 200_000_000


def test_parts_by_what_is_left_of_memory() -> None:
    limits = (300_000_000, 150_000_000, 150_000_000)
    plan = planned(memory=limits)
    held = plan.predicted.memory_by_rank
    assert all(have <= limit for have, limit in zip(held, limits, strict=True))
    assert placement(plan, QUERY) == "8@tp:4:2:2*256, 2048"
    assert plan.predicted.memory is not None and plan.predicted.memory.total == held[1]
    first, second, _ = map(int, placement(plan, UP).partition(":")[2].partition(",")[0].split(":"))
    assert abs(first / second - plan.workload.shares[0] / plan.workload.shares[1]) < 0.01
    assert shardwright.check(plan, CONFIG).digest == plan.digest
    assert "286.1 MiB, " in as_text(plan) and "by rank" in as_text(plan)


def test_what_fits_in_no_way() -> None:
    with pytest.raises(InfeasibleError, match="no plan fits ranks that may hold 190.7 MiB, 95.4"):
        planned(memory=(200_000_000, 100_000_000, 100_000_000))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"tp": 2, "speeds": (1, 1, 1)}, "speeds: 3 numbers for tp=2 ranks"),
        ({"tp": 2, "speeds": (1, 0)}, "speeds: each must be above 0"),
        (
            {"tp": 2, "memory": (1 << 30, float("nan"))},
            "memory must be an int of bytes, or one for each rank",
        ),
        ({"mesh": {"cp": 2, "tp": 2}, "speeds": (1, 2)}, "be combined with cp, ep or dp='fsdp'"),
        ({"cluster": shardwright.Cluster(1, 2), "speeds": (1, 2)}, "give tp or mesh instead"),
    ],
)
def test_what_does_not_go_together(how: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        planning.plan(CONFIG, **how)


def test_no_export_to_runtimes_that_share_out_evenly() -> None:
    with pytest.raises(UsageError, match="other runtimes share out evenly"):
        shardwright.export(planned(speeds=(2, 1)), "transformers", model=CONFIG)


@pytest.mark.parametrize(
    ("name", "speeds"),
    [("llama", (2, 1, 1)), long("phi3", (1, 2)), long("gpt2", (1, 2, 1)), long("qwen2", (3, 1))],
)
def test_equals_the_whole_model(name: str, speeds: tuple[float, ...]) -> None:
    """Logits, all gradients and a decode step; the collectives are those predicted."""
    config, model = build("causal", name, torch.float64)
    inputs = zoo.inputs(name, config)
    plan = planning.plan(model, tp=len(speeds), speeds=speeds)
    assert plan.workload.shares and len({*plan.predicted.parameter_bytes}) > 1
    assert_equal_to_the_whole(model, inputs, plan)


def test_loaded_trained_and_saved(tmp_path: Path) -> None:
    """Ranks read their parts, an optimizer steps, and the saved model is that of one process."""
    whole: Any = zoo.build("llama")[1]
    whole.save_pretrained(tmp_path / "model")
    plan = planning.plan(str(tmp_path / "model"), tp=2, speeds=(3, 1), phase="train")
    ids = torch.arange(24).view(2, 12) % 50 + 3

    def trained(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return model

    def work(at: Mesh) -> None:
        model = trained(shardwright.load(tmp_path / "model", plan, mesh=at.device_mesh))
        shardwright.save(model, tmp_path / "saved")

    trained(whole)
    run_ranks(2, work)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for key, value in whole.state_dict().items():
        if key in saved:
            torch.testing.assert_close(saved[key], value, rtol=0, atol=1e-6)
