"""Heads and vocabularies that ranks do not divide, and copies that share a batch, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from shardwright.planner.on_ranks.numeric import compare
from tests import planning

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 131,
    "architectures": ["LlamaForCausalLM"],
}
SIX = GPT2Config(
    n_embd=48, n_head=6, n_layer=2, vocab_size=50257, architectures=["GPT2LMHeadModel"]
)
ROOM = {"batch": 64, "seq": 1024, "memory": 2**40}


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        (LlamaConfig(**SIZES, num_key_value_heads=2), {"tp": 4}, {}),
        (SIX, {"tp": 4}, ROOM),
        (LlamaConfig(**SIZES, num_key_value_heads=4), {"dp": 2, "tp": 2}, {}),
    ],
    ids=["2 kv heads over 4", "6 heads and 50257 words over 4", "2 copies over 2"],
)
def test_equal_on_processes(config: Any, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Logits and all gradients, over gloo."""
    plan = planning.plan(config, mesh=mesh, **options)
    assert bool(plan.sub_axes) == (mesh == {"tp": 4})
    found = compare(plan, config)
    assert found.ok, found
