"""Experts, split over two thread ranks: torch's grouped product knows no float64, so in float32."""

from __future__ import annotations

import pytest

from benchmarks.compare import compare, reference
from tests import planning, zoo
from tests.ranks import run_ranks

TOLERANCE = 1e-4  # of float32 sums taken in another order; a wrong expert or head makes far more


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_equal_the_whole_model(name: str) -> None:
    """Logits, gradients and a decode step; all block weights split."""
    config, model = zoo.build(name, attn="sdpa")
    inputs = zoo.inputs(name, config)
    plan = planning.plan(model, tp=2)
    expected = reference(model, inputs)
    for found in run_ranks(2, lambda mesh: compare(model, inputs, plan, mesh, expected)):
        assert found.logits <= TOLERANCE
        assert found.gradients is not None and found.gradients <= TOLERANCE, found.worst
        assert found.decode is not None and found.decode <= TOLERANCE
        assert found.split >= 0.9
