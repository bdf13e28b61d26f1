"""Axes of torch's grouped product are sharded in multiples of 16 bytes."""

import copy

import torch
from transformers import AutoModelForCausalLM, GptOssConfig

import shardwright
from tests import planning
from tests.ranks import run_ranks

PINS = {"model.layers.*.mlp.experts.down_proj": "shard:1"}


def test_uneven_experts_keep_rows_of_16_bytes() -> None:
    """40 columns of bfloat16 on 3 ranks: 16, 16 and 8, where 14, 13 and 13 would fail."""
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=64, intermediate_size=40, num_hidden_layers=1, vocab_size=96, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["full_attention"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert "grouped_mm" in model.get_experts_implementation().values()
    plan = planning.plan(model, tp=3, pins=PINS)
    ids = torch.arange(1, 15).view(2, 7)
    expected = model(ids).logits

    def run(mesh: object) -> tuple[torch.Tensor, torch.Size]:
        split = shardwright.apply(copy.deepcopy(model), plan, mesh)  # type: ignore[arg-type]
        weight = split.model.layers[0].mlp.experts.down_proj
        return split(ids).logits, weight.to_local().shape

    found = run_ranks(3, run)
    assert [shape[1] for _, shape in found] == [16, 16, 8]
    for logits, _ in found:
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-2)
