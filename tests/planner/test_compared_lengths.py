"""Code compares lengths with floats and negative numbers, in lists and in any: equal or refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.contract.lengths import holds
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests.planning import plan
from tests.ranks import run_ranks


class Rolls(nn.Module):
    """With short sequences it needs all features of a tensor that else is split."""

    def __init__(self, long: Callable[[Tensor, Any], Any] = lambda x, model: True) -> None:
        super().__init__()
        self.long = long
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return self.down(h if self.long(x, self) else h.roll(1, -1))


TESTS: dict[str, Callable[[Tensor, Any], Any]] = {
    "negative": lambda x, model: -x.shape[1] < -15,
    "difference": lambda x, model: 10 - x.shape[1] > -6,
    "half": lambda x, model: x.shape[1] > 15.5,
    "not below": lambda x, model: not x.shape[1] <= 15.5,
    "quotient": lambda x, model: (x.shape[1] / 19).is_integer(),
    "divisor": lambda x, model: math.gcd(x.shape[1], 19) == 19,
    "any": lambda x, model: any(n == 19 for n in x.shape),
    "all": lambda x, model: all(n > 15 or n == 3 or n == 2 for n in x.shape),
    "list": lambda x, model: [x.shape[1]] > [15],
}


def is_equal(split: nn.Module, model: nn.Module, x: Tensor) -> bool:
    """Whether the split model gives what the model gives; False if it refuses the length."""
    try:
        out = split(x)
    except UsageError as error:
        assert "decides by a length" in str(error)
        return False
    torch.testing.assert_close(out, model(x), rtol=0, atol=1e-9)
    return True


@pytest.mark.parametrize("name", TESTS)
def test_equal_or_refused(name: str) -> None:
    torch.manual_seed(0)
    model = Rolls(TESTS[name]).double()
    found = plan(model, 2, args=(torch.randn(3, 19, 32).double(),))

    def rank(mesh: Mesh) -> int:
        split, equal = apply(copy.deepcopy(model), found, mesh), 0
        for shape in ((3, 19), (2, 7), (4, 8)):
            x = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(0)).double()
            equal += is_equal(split, model, x)
        return equal

    assert min(run_ranks(2, rank)) >= 1


class OtherLength(Rolls):
    """What it decides by at first does not matter, since the batch was small."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = torch.relu(self.up(x))
        return self.down(h.roll(1, -1) if length < 10 and batch > 5 else h)


def test_a_length_beside_another_one() -> None:
    torch.manual_seed(0)
    model = OtherLength().double()
    found = plan(model, 2, args=(torch.randn(3, 19, 32).double(),))
    x = torch.randn(6, 7, 32).double()

    run_ranks(2, lambda mesh: is_equal(apply(copy.deepcopy(model), found, mesh), model, x))


def test_negative_numbers_are_read() -> None:
    assert holds("(0 - x.shape[1]) < -5", {"x.shape[1]": 6})
    assert not holds("x.shape[1] == -1", {"x.shape[1]": 6})
