"""What autograd keeps between folded blocks is priced as in the unfolded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.prepare import prepare
from tests import planning

WIDTH = 24


class Block(nn.Module):
    """Keeps what it is given, which nothing behind the last block keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).sin())


class Model(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(4)), last

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize("last", [nn.Identity, lambda: nn.LayerNorm(WIDTH)])
def test_each_copy_is_counted_as_it_is_kept(last: Any) -> None:
    how: dict[str, Any] = {"tp": 2, "phase": "train", "args": (torch.randn(3, 19, WIDTH),)}
    model = Model(last())
    assert prepare(model, **how).folding.stacks
    assert planning.plan(model, **how).predicted.memory is not None
