"""Torch's layers take shortcuts where no gradient is asked for: split ones must not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests.planner.equal import features, planned, randomize
from tests.planner.modules import TorchAttention, encoder
from tests.ranks import run_ranks

WIDTH = 64


def nested() -> nn.Module:
    """A stack that packs its sequences where some are padded."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


class Padded(nn.Module):
    """A model that hands padding on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner(x) if mask is None else self.inner(x, src_key_padding_mask=mask)


def mask(batch: int, seq: int) -> Tensor:
    out = torch.zeros(batch, seq, dtype=torch.bool)
    out[1, 4:] = True
    return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [encoder, nested, TorchAttention])
def test_inference_is_that_of_the_whole_model(make: Callable[[], nn.Module], padded: bool) -> None:
    """Eval mode, no gradients: padding too, which makes other shortcuts."""
    torch.manual_seed(0)
    inner = make().double().eval()
    randomize(inner)
    model, padded = Padded(inner), padded and make is not TorchAttention
    inputs = features(WIDTH)
    given = (lambda b, t: (*inputs(b, t), mask(b, t))) if padded else inputs
    plan = planned(model, given, 2)
    split = {
        name
        for module in plan.modules.values()
        for name, p in module.parameters.items()
        if "@" in p.placement
    }
    assert split >= {"in_proj_weight", "in_proj_bias", "weight"}
    args = given(2, 7)

    def run(local: nn.Module) -> Tensor:
        with torch.no_grad():
            return local(*args)

    want = run(model)

    def rank(mesh: Mesh) -> Tensor:
        return run(apply(copy.deepcopy(model), plan, mesh))

    kept = ~args[1] if padded else torch.ones(2, 7, dtype=torch.bool)
    for got in run_ranks(2, rank):
        size = min(got.shape[1], want.shape[1])  # a packed stack may cut what all have as padding
        torch.testing.assert_close(got[:, :size][kept[:, :size]], want[:, :size][kept[:, :size]])
