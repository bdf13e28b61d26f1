"""Timing plans on ranks: which are timed, and which is kept."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

import shardwright
from shardwright.errors import UsageError
from shardwright.planner import tune as tuning
from shardwright.planner.cli.main import main
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.prepare import prepare
from shardwright.planner.search.ladder import search
from shardwright.planner.search.search_state import SearchState
from tests import planning
from tests.planning import as_text

CONFIG = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=96, architectures=["LlamaForCausalLM"], dtype=torch.float32,
)  # fmt: skip


@pytest.fixture(scope="module")
def ended() -> SearchState:
    return search(prepare(CONFIG, tp=2, device="cpu-gloo", seq=16))


@pytest.fixture(scope="module")
def others(ended: SearchState) -> list[SearchState]:
    return [*islice(tuning.other_searches(ended, ()), 4)]


def test_other_plans_are_unlike_and_as_good_as_their_price(
    ended: SearchState, others: list[SearchState]
) -> None:
    plans = [ended.plan, *(other.plan for other in others)]
    assert len(plans) == 5
    for n, plan in enumerate(plans):
        assert all(plan.modules != other.modules for other in plans[:n])
        assert plan.predicted.time_ns >= ended.plan.predicted.time_ns or plan.pins
    assert all(len(plan.pins) == 1 for plan in plans[1:])


@pytest.mark.parametrize(("best", "kept"), [(0.5, True), (0.99, False)])
def test_another_is_kept_if_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
    ended: SearchState,
    others: list[SearchState],
    best: float,
    kept: bool,
) -> None:
    """The second is fastest; less than 2 % may be noise."""

    def measured(ranks: int, fn: Any, plan: Plan, plans: list[Plan], *_: Any, **how: Any) -> Any:
        shares = [1.5, best, *[2.0] * (len(plans) - 2)]
        return [[(1000, int(1000 * share)) for share in shares]] * ranks

    monkeypatch.setattr(tuning, "run_processes", measured)
    monkeypatch.setattr(tuning, "other_searches", lambda *_: iter(others))
    found = tuning.tune_search(ended, CONFIG).plan
    assert found.modules == (others[1] if kept else ended).plan.modules
    assert [trial.share for trial in found.trials[:2]] == [best, 1.5]
    assert found.trials[0].pins == others[1].plan.pins
    words = " ".join(as_text(found).split())
    assert (f"this one was the fastest, with {best:.2f} times" in words) == kept
    assert Plan.from_json(found.to_json()) == found
    assert shardwright.check(found, CONFIG).digest == found.digest


def test_what_cannot_be_timed(tmp_path: Path) -> None:
    how: Any = {"mesh": {"dp": 2, "tp": 2}, "phase": "train", "dp": "fsdp"}
    plan = planning.plan(CONFIG, device="cpu-gloo", seq=16, **how)
    with pytest.raises(UsageError, match="a plan for fully_shard cannot be timed"):
        shardwright.tune(plan, CONFIG)
    CONFIG.save_pretrained(tmp_path)
    asked = ["plan", str(tmp_path), "--hosts", "2", "--gpus-per-host", "1", "--tune"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 2 and "--tune starts ranks on this machine" in result.output


@pytest.mark.long
def test_on_ranks(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path / "model")
    phases = ["--phase", "prefill,decode:4,train", "--seq", "16", "--device", "cpu-gloo"]
    asked = ["plan", str(tmp_path / "model"), "--ranks", "2", "--tune", *phases]
    result = CliRunner().invoke(main, [*asked, "-o", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    plan = Plan.load(tmp_path / "plan.json")
    assert len(plan.trials) == tuning.MAX_PLANS - 1
    assert all(trial.time_ns > 0 and trial.beside_ns > 0 for trial in plan.trials)
    assert {*map(len, (trial.mesh for trial in plan.trials))} == {1, 2}
