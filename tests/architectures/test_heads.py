"""Heads and vocabularies that ranks do not divide, on thread ranks, equal to the whole model.

The norms are torch's own: those of transformers compute in float32 whatever the dtype, so that
sums taken in another order may differ by a float32 rounding.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright
from benchmarks.compare import compare, reference
from shardwright.planner.plan_file import Plan
from tests.ranks import run_ranks

WIDTH = 8
ROOM = {"batch": 64, "seq": 1024, "memory": 2**40}
"""A workload and a budget under which time, not bytes, decides."""
BY_KEYS = {**ROOM, "pins": {"model.layers.*.self_attn.k_proj.weight": "shard:0"}}
"""What sub-dims split takes two gathers: left to itself, a plan would have all keys everywhere."""


def llama(heads: int, keys: int, vocabulary: int = 131) -> nn.Module:
    """A tiny llama in float64 with weights that show a mistake in the logits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH * heads,
        head_dim=WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
    )
    model = LlamaForCausalLM(config).double().eval()
    for name in [n for n, _ in model.named_modules()]:
        if name.endswith("norm"):
            owner, _, leaf = name.rpartition(".")
            norm = nn.RMSNorm(WIDTH * heads, 1e-6, dtype=torch.float64)
            setattr(model.get_submodule(owner), leaf, norm)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, parameter.shape[-1] ** -0.5)
    return model


class Case(NamedTuple):
    """A model, how it is planned, and how its query and key weights must come out."""

    tp: int
    heads: int
    keys: int
    vocabulary: int
    options: dict[str, Any]
    query: str
    key: str


CASES = {
    "2 kv heads over 4": Case(4, 8, 2, 131, {}, "2@tp.0*4@tp.1*8, 64", "2@tp.0*8, 64"),
    "6 heads over 4": Case(4, 6, 6, 131, ROOM, "6@tp*8, 48", "6@tp*8, 48"),
    "10 kv heads over 4": Case(4, 40, 10, 131, ROOM, "10@tp.0*4@tp.1*8, 320", "10@tp.0*8, 320"),
    "2 kv heads over 8": Case(8, 32, 2, 131, BY_KEYS, "2@tp.0*16@tp.1*8, 256", "2@tp.0*8, 256"),
    "4 kv heads over 8": Case(8, 32, 4, 131, BY_KEYS, "4@tp.0*8@tp.1*8, 256", "4@tp.0*8, 256"),
    "50257 words over 4": Case(4, 4, 4, 50257, {}, "4@tp*8, 32", "4@tp*8, 32"),
    "50257 words over 8": Case(8, 8, 8, 50257, {}, "8@tp*8, 64", "8@tp*8, 64"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equal_in_float64(case: Case) -> None:
    """Logits, all gradients and a decode step; the collectives are those predicted."""
    model = llama(case.heads, case.keys, case.vocabulary)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, case.vocabulary, (2, 13), generator=generator)
    inputs = {"input_ids": ids, "use_cache": False}
    plan = shardwright.plan(model, tp=case.tp, **case.options)
    assert (placement(plan, "q_proj"), placement(plan, "k_proj")) == (case.query, case.key)
    if case.vocabulary == 50257:
        assert placement(plan, "lm_head") == f"50257@tp, {WIDTH * case.heads}"
    expected = reference(model, inputs)
    predicted = {
        phase: {c.kind: c.count for c in plan.predicted.collectives if c.phase == phase}
        for phase in ("forward", "backward")
    }
    for found in run_ranks(case.tp, lambda mesh: compare(model, inputs, plan, mesh, expected)):
        assert found.logits <= 1e-9
        assert found.gradients is not None and found.gradients <= 1e-9, found.worst
        assert found.decode is not None and found.decode <= 1e-9
        assert predicted == {"forward": dict(found.forward), "backward": dict(found.backward)}


def placement(plan: Plan, module: str) -> str:
    """How the weight of the modules of that name is stored."""
    (found,) = {
        spec.parameters["weight"].placement
        for name, spec in plan.modules.items()
        if re.search(rf"\b{module}$", name)
    }
    return found
