"""Convolutions in groups: the number of groups that a rank has is an attribute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.planner.equal import assert_equal, planned
from tests.predicted import predicted

WIDTH, INNER, GROUPS = 6, 12, 6


class Grouped(nn.Module):
    """A convolution in groups, between two that mix them."""

    def __init__(self, grouped: nn.Module) -> None:
        super().__init__()
        self.up, self.grouped = nn.Linear(WIDTH, INNER), grouped
        self.down = nn.Linear(2 * INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.grouped(self.up(x).transpose(1, 2)).transpose(1, 2))


class ByNumber(nn.Module):
    """Its code has the number of groups as a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * INNER, INNER // GROUPS, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv1d(x, self.weight, groups=6)


def inputs(batch: int, seq: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, seq, WIDTH, dtype=torch.float64),)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("groups", [GROUPS, INNER])
@pytest.mark.parametrize("make", [nn.Conv1d, nn.ConvTranspose1d])
def test_split_by_groups(make: type[nn.Conv1d], groups: int, tp: int) -> None:
    torch.manual_seed(0)
    model = Grouped(make(INNER, 2 * INNER, 3, padding=1, groups=groups)).double()
    plan = planned(model, inputs, tp)
    assert plan.modules["grouped"].attributes == {"groups": f"{groups}@tp"}
    assert predicted(plan, "forward").keys() == {"all_reduce"}
    assert_equal(model, inputs, plan)


def test_a_number_cannot_be_local() -> None:
    torch.manual_seed(0)
    model = Grouped(ByNumber()).double()
    plan = planned(model, inputs, 2)
    weight = plan.modules["grouped"].parameters["weight"].placement
    assert not weight.startswith(f"{GROUPS}@")
    assert_equal(model, inputs, plan)
