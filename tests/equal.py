"""Split on thread ranks, a model in float64 is the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from benchmarks.compare import compare, predicted, reference
from shardwright.planner.contract.plan_file import Plan
from tests.ranks import run_ranks


def assert_equal_to_the_whole(model: nn.Module, inputs: Mapping[str, Any], plan: Plan) -> None:
    """Logits, all gradients and a decode step; the collectives are those predicted."""
    expected = reference(model, inputs)
    for found in run_ranks(
        plan.world_size, lambda mesh: compare(model, inputs, plan, mesh, expected)
    ):
        assert found.logits <= 1e-9
        assert found.gradients is not None and found.gradients <= 1e-9, found.worst
        assert found.decode is not None and found.decode <= 1e-9
        assert predicted(plan) == {
            "forward": dict(found.forward),
            "backward": dict(found.backward),
        }
