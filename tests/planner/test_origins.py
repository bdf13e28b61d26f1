"""Code that decides by what ranks have otherwise: it makes the same calls on other tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.planner.equal import assert_equal, features, planned

WIDTH, INNER = 24, 60


class Net(nn.Module):
    """Two layers and a gate beside the first; `do` runs between them."""

    def __init__(self, do: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.do = do
        self.up, self.gate = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.shift = nn.Parameter(torch.ones(INNER))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.do(self, x, self.up(x)))


def _is_whole(h: Tensor) -> int:
    return int(h.shape[-1] > INNER // 2)


def _parameter(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return h * [net.up.bias, net.shift][_is_whole(h)] * net.gate(x)


def _weight(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return h * F.linear(x, [net.up.weight, net.gate.weight][_is_whole(h)])


def _operand(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return h * [net.gate(x), h][_is_whole(h)]


def _order(net: Net, x: Tensor, h: Tensor) -> Tensor:
    first, second = [(net.gate(x), h), (h, net.gate(x))][_is_whole(h)]
    return F.gelu(first) * F.relu(second)


def _passed_on(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return [net.gate(x), h][_is_whole(h)]


def _piece(net: Net, x: Tensor, h: Tensor) -> Tensor:
    pieces = net.gate(x).relu().chunk(2, -1)
    return h * torch.cat([pieces[_is_whole(h)]] * 2, -1)


def _view(net: Net, x: Tensor, h: Tensor) -> Tensor:
    chosen = [net.gate(x), h][_is_whole(h)]
    return h * chosen.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2).sigmoid()


def _changed(net: Net, x: Tensor, h: Tensor) -> Tensor:
    gate, out = net.gate(x).clone(), h.clone()
    return [gate, out][_is_whole(h)].mul_(h) + gate * out


@pytest.mark.parametrize(
    "do",
    [_parameter, _weight, _operand, _order, _passed_on, _piece, _view, _changed],
)
@pytest.mark.parametrize("tp", [2, 3])
def test_same_calls_on_other_tensors(do: Callable[..., Tensor], tp: int) -> None:
    model = Net(do)
    assert_equal(model, features(WIDTH), planned(model, features(WIDTH), tp), collectives=False)


def _gated(net: Net, x: Tensor, h: Tensor) -> Tensor:
    return h * net.gate(x).sigmoid()


def test_a_gated_layer_is_still_sharded() -> None:
    plan = planned(Net(_gated), features(WIDTH), 2)
    assert "@" in plan.modules["up"].parameters["weight"].placement
