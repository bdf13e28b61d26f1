"""Models of timm, diffusers and x-transformers, which know nothing of us: split, and equal."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.uses.models import FOREIGN
from tests.planner.equal import assert_equal, planned

NAMES = ("timm/vit", "timm/swin", "diffusers/dit", "diffusers/unet", "x_transformers/decoder")


@pytest.mark.parametrize("name", NAMES)
def test_split_and_equal(name: str) -> None:
    """Outputs, gradients of inputs and parameters, and collectives as predicted."""
    torch.manual_seed(0)
    foreign = FOREIGN[name]
    model = foreign.make().double().eval()
    plan = planned(copy.deepcopy(model), foreign.inputs, 2)
    assert max(plan.predicted.parameter_bytes) < 0.7 * plan.predicted.unsharded_bytes
    assert_equal(model, foreign.inputs, plan, spread=0.1)
