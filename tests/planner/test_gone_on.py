"""Outputs that the model itself goes on with: one tensor, for whoever asks for its gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import features, planned, weigh
from tests.ranks import run_ranks


class Block(nn.Module):
    """Gives its features, and goes on with them: split where they leave, they would be two."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x).relu()
        return x + self.down(h), h


class Blocks(nn.Module):
    """All features are given out, or only those of the last block."""

    def __init__(self, every: bool) -> None:
        super().__init__()
        self.blocks, self.every = nn.ModuleList(Block() for _ in range(2)), every

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        given = []
        for block in self.blocks:
            x, h = block(x)
            given.append(h)
        return x, given if self.every else given[-1:]


def asked(model: Any, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradients of what the model gives, kept and changed by hooks, and of its parameters."""
    out, given = model(x)
    for tensor in given:
        tensor.register_hook(lambda grad: grad * 2)
        tensor.retain_grad()
    (weigh(out) + weigh([h**2 for h in given])).backward()
    kept = [h.grad for h in given]
    grads = {name: p.grad for name, p in model.named_parameters()}
    return kept, full_tensors(model, grads)


@pytest.mark.parametrize("every", [True, False])
def test_gradients_of_outputs_are_those_of_all_that_is_made_of_them(every: bool) -> None:
    torch.manual_seed(0)
    model = Blocks(every).double()
    plan = planned(model, features(12), tp=2)
    assert max(plan.predicted.parameter_bytes) < 0.6 * plan.predicted.unsharded_bytes
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    want = asked(copy.deepcopy(model), x)

    def split(mesh: Mesh) -> Any:
        return asked(apply(copy.deepcopy(model), plan, mesh), x)

    for found in run_ranks(2, split):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
