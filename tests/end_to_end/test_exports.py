"""What is exported, run by torch and by transformers on two real ranks."""

from importlib.util import find_spec
from typing import Any

import pytest

import shardwright
from shardwright.planner.on_ranks.stock import Table, try_out
from tests import planning, zoo

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="transformers splits no model without accelerate"
)


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
def test_a_wrong_table_is_seen(tmp_path) -> None:
    """Rows without columns: what transformers computes then is wrong, or it raises."""
    model: Any
    config, model = zoo.build("llama")
    model.save_pretrained(tmp_path)
    table = dict.fromkeys(model.tp_plan, "replicate")
    wrong = Table({**table, "model.layers.*.mlp.down_proj": "all_reduce"})
    assert not try_out(wrong, type(model), str(tmp_path), zoo.inputs("llama", config), 2).ok
