"""Heads and a vocabulary that ranks do not divide, on real ranks.

`tests/architectures/test_heads.py` and `test_mesh.py` have more cases, on ranks that are threads.
"""

from __future__ import annotations

import pytest
from transformers import GPT2Config

from shardwright.planner.on_ranks.numeric import compare
from tests import planning


@pytest.mark.long
def test_equal_on_processes() -> None:
    """Six heads and 50257 words over four: logits and all gradients, over gloo."""
    config = GPT2Config(
        n_embd=48, n_head=6, n_layer=2, vocab_size=50257, architectures=["GPT2LMHeadModel"]
    )
    plan = planning.plan(config, mesh={"tp": 4}, batch=64, seq=1024, memory=2**40)
    assert plan.sub_axes
    found = compare(plan, config)
    assert found.ok, found
