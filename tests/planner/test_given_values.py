"""Values of integer inputs with which a model was traced: calls with others take no unseen path."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from tests import planning
from tests.ranks import run_ranks

X = torch.randn(3, 19, 24, generator=torch.Generator().manual_seed(1)).double()
IDS = torch.arange(3)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def mlp(self, x: Tensor, turned: Any = False) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h.roll(1, -1) if turned else h))


class Sized(Mlp):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.mlp(x)[:, : ids.sum().item()]


def scales(ids: Tensor) -> Tensor:
    """Only integers are here, whatever it decides."""
    last = int(ids.max())
    return torch.arange(19) * (2 if last > 50 else 1)


class Positions(Mlp):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.mlp(x) * scales(ids)[None, :, None]


@pytest.mark.parametrize("kind", [Sized, Positions])
def test_other_values_are_equal(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    plan = planning.plan(copy.deepcopy(model), tp=2, args=(X, IDS))
    assert any("@" in p.placement for m in plan.modules.values() for p in m.parameters.values())
    assert not plan.calls[0].values
    want = [model(X, IDS + n) for n in (0, 1, 100)]

    def use(mesh: Any) -> list[Tensor]:
        local = apply(copy.deepcopy(model), plan, mesh)
        return [local(X, IDS + n) for n in (0, 1, 100)]

    for found in run_ranks(2, use):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)


class Decides(Mlp):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.mlp(x, int(ids.sum()) > 100)


def many(ids: Tensor) -> bool:
    return int(ids.sum()) > 100


class DecidesElsewhere(Mlp):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.mlp(x, many(ids))


class Branches(Mlp):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.mlp(x, ids.tolist()[0] + 1 > 10)


class Loops(Mlp):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for i in range(ids.sum().item()):  # type: ignore[arg-type]
            x = x + self.mlp(x, i > 10)
        return x


@pytest.mark.parametrize("kind", [Decides, DecidesElsewhere, Branches, Loops])
def test_other_values_are_refused(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    plan = planning.plan(copy.deepcopy(model), tp=2, args=(X, IDS))
    assert any("@" in p.placement for m in plan.modules.values() for p in m.parameters.values())
    want = model(X, IDS)

    def use(mesh: Any) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        for _ in range(2):
            torch.testing.assert_close(local(X, IDS), want, rtol=0, atol=1e-9)
            with pytest.raises(UsageError, match="argument 'ids' of .* has other values than in"):
                local(X, IDS + 100)

    run_ranks(2, use)
