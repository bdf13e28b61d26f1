"""What is exported, run by torch and by transformers on two real ranks."""

import json
import multiprocessing
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

import shardwright
from benchmarks.forked import fork_server
from shardwright.errors import PlanError, UsageError
from shardwright.planner.on_ranks import launch
from shardwright.planner.on_ranks.stock import Table, try_out
from tests import planning, zoo

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="transformers splits no model without accelerate"
)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks be forks of a process that has imported torch: imports take most of their time.

    In `tests/serving/test_serve.py` they are spawned, as for users.
    """
    context = fork_server("shardwright.planner.on_ranks.stock")
    of_ranks = SimpleNamespace(
        get_context=lambda how: context, current_process=multiprocessing.current_process
    )
    monkeypatch.setattr(launch, "multiprocessing", of_ranks)


def test_torch_runs_what_is_written_for_it() -> None:
    """Exporting runs it; a tied head stays tied, or its gradient would be a part of the sum."""
    model: Any
    _, model = zoo.build("llama", tie_word_embeddings=True)
    model.tie_weights()
    text = shardwright.export(planning.plan(model, tp=2), "torch", model=model)
    assert isinstance(text, str)
    assert '"model.layers.*.mlp.up_proj": ColwiseParallel()' in text


@needs_accelerate
def test_transformers_carries_out_a_whole_plan(tmp_path) -> None:
    """GPT-2: a fused weight, Conv1D and a number of heads, tied to a head that no file has."""
    model: Any
    config, model = zoo.build("gpt2")
    plan = planning.plan(model, tp=2)
    model.save_pretrained(tmp_path)
    ran = try_out(Table(plan), type(model), str(tmp_path), zoo.inputs("gpt2", config), 2)
    assert ran.ok and ran.bytes == 2 * max(plan.predicted.parameter_bytes)  # in float64


@needs_accelerate
def test_transformers_sends_tokens_to_experts_as_in_its_own_table() -> None:
    model: Any
    _, model = zoo.build("qwen3_moe")
    plan = planning.plan(model, mesh={"ep": 2, "tp": 2})
    made = json.loads(shardwright.export(plan, "transformers", model=model))
    assert made["base_model_ep_plan"] == type(model.config).base_model_ep_plan
    assert (made["tp_size"], made["fsdp_size"], made["ep_size"]) == (2, 2, 4)
    assert not any("experts" in key for key in made["base_model_tp_plan"])
    assert max(made["proof"]["logits"], made["proof"]["gradients"]) < 1e-9
    held = made["lost"]["bytes_a_rank"]
    assert held["table"] == held["plan"] < 0.35 * held["unsplit"]


def test_experts_that_transformers_cannot_spread() -> None:
    """They are told counts, or ranks have other numbers of them; other formats have none."""
    model: Any
    _, model = zoo.build("jetmoe", num_hidden_layers=1)
    plan = planning.plan(model, mesh={"ep": 2, "tp": 1})
    with pytest.raises(PlanError, match="input_linear' takes inputs, expert_size: use shardwright"):
        shardwright.export(plan, "transformers", model=model)
    _, model = zoo.build("qwen3_moe", num_hidden_layers=1)
    plan = planning.plan(model, mesh={"ep": 3, "tp": 1})
    with pytest.raises(PlanError, match="experts' has 4 for 3: use shardwright.load"):
        shardwright.export(plan, "transformers", model=model)
    with pytest.raises(UsageError, match="the plan has copies of the model"):
        shardwright.export(plan, "torch", model=model)


@needs_accelerate
def test_a_wrong_table_is_seen(tmp_path) -> None:
    """Rows without columns: what transformers computes then is wrong, or it raises."""
    model: Any
    config, model = zoo.build("llama")
    model.save_pretrained(tmp_path)
    table = dict.fromkeys(model.tp_plan, "replicate")
    wrong = Table({**table, "model.layers.*.mlp.down_proj": "all_reduce"})
    assert not try_out(wrong, type(model), str(tmp_path), zoo.inputs("llama", config), 2).ok
