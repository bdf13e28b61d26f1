"""Code that asks whether gradients are wanted, and computes otherwise, is proven both ways."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, is_grad_enabled, nn

from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests.planner.equal import features, planned, randomize
from tests.planning import trace
from tests.ranks import run_ranks

WIDTH, INNER = 12, 24


class Mlp(nn.Module):
    checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(self.up(x)))

    def inner(self, h: Tensor) -> Tensor:
        return h.relu() if torch.is_grad_enabled() and self.checkpointing else h.relu()


class Saves(Mlp):
    """A fused way without gradients, and statistics of what is split with them."""

    def inner(self, h: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            h = h / (1 + h.pow(2).mean(-1, keepdim=True))
        return h.relu()


class SavesByName(Mlp):
    """The same, by a name that was bound when this file was imported."""

    def inner(self, h: Tensor) -> Tensor:
        if is_grad_enabled():
            h = h / (1 + h.pow(2).mean(-1, keepdim=True))
        return h.relu()


class Infers(Mlp):
    def inner(self, h: Tensor) -> Tensor:
        return h.softmax(-1) if torch.is_inference_mode_enabled() else h / (1 + h.sum(-1, True))


def shown(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        found = [model(x).clone()]
    with torch.no_grad():
        found.append(model(x))
    x = x.clone().requires_grad_()
    found.append(model(x))
    found[-1].pow(3).sum().backward()
    assert x.grad is not None
    return [*found, x.grad]


@pytest.mark.parametrize("kind", [Saves, SavesByName, Infers])
def test_both_ways_are_equal(kind: type[Mlp]) -> None:
    model = kind().double()
    randomize(model)
    plan = planned(model, features(WIDTH), 2)
    assert min(plan.predicted.parameter_bytes) < plan.predicted.unsharded_bytes
    (x,) = features(WIDTH)(2, 7)
    want = shown(model, x)

    def rank(mesh: Mesh) -> list[Tensor]:
        return shown(apply(copy.deepcopy(model), plan, mesh), x)

    for found in run_ranks(2, rank):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "calls"), [(Mlp, 1), (Saves, 2)])
def test_what_hangs_on_nothing_is_traced_once(kind: type[Mlp], calls: int) -> None:
    """As in blocks of diffusers: `torch.is_grad_enabled() and self.gradient_checkpointing`."""
    inputs = torch.zeros(3, 19, WIDTH, device="meta")
    assert len(trace(kind().to("meta").eval(), (inputs,), {}).branch_paths) == calls
    assert is_grad_enabled is torch.is_grad_enabled
