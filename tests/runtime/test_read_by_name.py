"""Code of a model that goes through parameters and buffers by name sees what attributes give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.planner.equal import assert_equal, features, planned

WIDTH, INNER = 24, 36


def _by_name(net: Net) -> Tensor:
    return dict(net.down.named_parameters())["weight"].sum()


def _in_order(net: Net) -> Tensor:
    return next(net.down.parameters()).square().mean()


def _within(net: Net) -> Tensor:
    return dict(net.named_parameters("net"))["net.down.weight"].sum()


def _buffer(net: Net) -> Tensor:
    return dict(net.named_buffers())["gains"].square().sum()


def _penalty(net: Net) -> Tensor:
    """The tied weight counts once."""
    return sum((p.square().sum() for p in net.parameters()), torch.zeros(()).double())


def _norm(net: Net) -> Tensor:
    return sum((b.norm() for b in net.buffers()), torch.zeros(()).double())


WAYS = (_by_name, _in_order, _within, _buffer, _penalty, _norm)


class Net(nn.Module):
    """What is read is a factor of what a split layer takes: a part of it would be added later."""

    gains: Tensor

    def __init__(self, read: Callable[[Net], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.tied = nn.Linear(INNER, WIDTH, bias=False)
        self.tied.weight = self.down.weight
        self.register_buffer("gains", torch.linspace(0.5, 1.5, INNER, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.up(x)) * self.gains
        return self.down(y * self.read(self)) + self.tied(y)


@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize("tp", [2, 3])
def test_what_is_read_by_name_has_the_placement_of_the_plan(
    read: Callable[[Net], Tensor], tp: int
) -> None:
    torch.manual_seed(0)
    net = Net(read).double()
    plan = planned(net, features(WIDTH), tp)
    assert any("@" in p.placement for m in plan.modules.values() for p in m.parameters.values())
    assert_equal(net, features(WIDTH), plan, collectives=False)
