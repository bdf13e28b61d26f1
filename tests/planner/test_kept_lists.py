"""Lists of a model in which calls leave tensors: no plan, and nothing of a trace stays in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from tests.planner.equal import assert_equal, features, planned


class Kept(nn.Module):
    """Goes on with what the call before left."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        h = self.up(x).relu()
        if self.log:
            h = h - self.log[-1].amax(-1, keepdim=True)
        self.log.append(h.detach().mean((0, 1)))
        return self.down(h)


class Stack(Kept):
    """Leaves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(self.up(x).relu())
        return self.down(self.log.pop())


class Anew(Kept):
    """Begins with another list."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.log = []
        self.log.append(self.up(x).relu())
        return self.down(self.log[0]), self.log[0].sum()


def test_what_goes_on_with_tensors_of_another_call_has_no_plan() -> None:
    module = nn.Sequential(Kept(), nn.Linear(12, 12)).double()
    with pytest.raises(ModelError, match=r"keeps '0\.log'.*pass it in and return it"):
        planned(module, features(12), 2)
    assert module[0].log == []
    assert module(torch.ones(1, 2, 12).double()).shape == (1, 2, 12)


@pytest.mark.parametrize("kind", [Stack, Anew])
def test_lists_of_a_call_are_split(kind: type[Kept]) -> None:
    module = kind().double()
    plan = planned(module, features(12), 2)
    assert module.log == []
    assert_equal(module, features(12), plan, collectives=False)
