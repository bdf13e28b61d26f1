"""A plan for one rank splits nothing, and its model loads, computes and saves as any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import shardwright
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh
from tests.planning import plan

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=64,
    architectures=["LlamaForCausalLM"],
)


@pytest.fixture(scope="module")
def alone() -> Plan:
    return plan(CONFIG, tp=1)


def test_a_model_of_a_plan_for_one_rank_is_saved(alone: Plan, tmp_path: Path) -> None:
    whole: Any = AutoModelForCausalLM.from_config(CONFIG)
    want = {name: p.detach().clone() for name, p in whole.named_parameters()}
    model = shardwright.apply(whole, alone, Mesh.shape_only({"tp": (0, 1)}))
    gathered = shardwright.full_tensors(model, dict(model.named_parameters()))
    shardwright.save(model, tmp_path / "out")
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert again.keys() == want.keys() == gathered.keys()
    for name, tensor in want.items():
        assert torch.equal(again[name], tensor) and torch.equal(gathered[name], tensor)


def test_a_model_without_a_plan_is_not(tmp_path: Path) -> None:
    with pytest.raises(shardwright.PlanError, match="this Linear is not split: save it with"):
        shardwright.save(nn.Linear(2, 2), tmp_path / "out")
