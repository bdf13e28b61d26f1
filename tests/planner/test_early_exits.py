"""Loops that data may end after each pass: exits after layers, halting. Each end is traced."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.api import apply
from tests import planning
from tests.ranks import run_ranks

WIDTH, LAYERS = 12, 4


class Exits(nn.Module):
    """It leaves once it is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
            for _ in range(LAYERS)
        )
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 6) for _ in range(LAYERS))

    def forward(self, x: Tensor, sure: Tensor) -> Tensor:
        y = x
        for layer, head, least in zip(self.layers, self.heads, sure, strict=True):
            x = x + layer(x)
            y = head(x.mean(1))
            if y.softmax(-1).amax(-1).min() > least:
                return y
        return y


class Halts(nn.Module):
    """It repeats a layer until all rows have had enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
        self.enough = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, sure: Tensor) -> Tensor:
        steps = 0
        while steps < LAYERS and (self.enough(x).sigmoid() < sure[steps]).any():
            x = x + self.layer(x)
            steps += 1
        return x * steps


class Within(nn.Module):
    def __init__(self, inner: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.last = inner(), nn.Linear(WIDTH if inner is Halts else 6, 18)

    def forward(self, x: Tensor, sure: Tensor) -> Tensor:
        return self.last(self.inner(x, sure))


def inputs(batch: int, length: int, passes: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs with which a loop ends after so many passes."""
    sure = 2.0 + torch.tensor([-3.0 * (i == passes) for i in range(LAYERS)]).double()
    return torch.randn(batch, length, WIDTH).double(), sure


@pytest.mark.parametrize("kind", [Exits, Halts])
@pytest.mark.parametrize("within", [False, True])
def test_each_end_of_a_loop(kind: type[nn.Module], within: bool) -> None:
    torch.manual_seed(0)
    model = (Within(kind) if within else kind()).double()
    plan = planning.plan(copy.deepcopy(model), tp=2, args=inputs(3, 19))
    assert not plan.opaque
    placements = [p.placement for m in plan.modules.values() for p in m.parameters.values()]
    assert any("24@tp" in placement for placement in placements)
    calls = [inputs(2, 7, passes) for passes in range(LAYERS + 1)]

    def use(local: nn.Module) -> list[Tensor]:
        out = [local(*call) for call in calls]
        sum(y.square().sum() for y in out).backward()  # type: ignore[union-attr]
        return [y.detach() for y in out]

    want = use(copy.deepcopy(model))
    for found in run_ranks(2, lambda mesh: use(apply(copy.deepcopy(model), plan, mesh))):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)
