"""Gradients that code makes or changes by itself: as of the whole, whatever they are made of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.planner.equal import assert_equal, features, planned

WIDTH, INNER = 12, 24


class Swish(torch.autograd.Function):
    """Of each element by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * s * (1 + x * (1 - s))


class Centred(Swish):
    """Linear in the gradient, of all elements."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad - grad.mean(-1, keepdim=True)


class Clipped(Swish):
    """Of each element, and not of a term of a sum."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clamp(-0.1, 0.1)


class Mlp(nn.Module):
    function: Any = Swish

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function.apply(self.up(x)))


class OfSums(Mlp):
    """What the function takes is pending a sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.down(self.up(x).relu()))


class Hooked(Mlp):
    """A hook on a tensor, and on one that a module gave whole."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        out = self.down(h.relu())
        for tensor in (h, out):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: grad / (1 + grad.norm()))
        return out


class Wants(Mlp):
    """Something else where a gradient is wanted."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h / (1 + h.pow(2).mean(-1, True)) if h.requires_grad else h.relu())


def is_split(plan: Any) -> bool:
    """Whether hidden features are split on their way from one layer to the next."""
    return any("@" in p.placement for p in plan.modules["down"].takes)


@pytest.mark.parametrize(
    ("kind", "function", "split"),
    [
        (Mlp, Swish, True),
        (Mlp, Centred, False),
        (Mlp, Clipped, False),
        (OfSums, Swish, True),
        (OfSums, Centred, True),
        (OfSums, Clipped, True),
        (Hooked, None, False),
        (Wants, None, False),
    ],
)
def test_equal(kind: type[Mlp], function: Any, split: bool) -> None:
    model = kind().double()
    model.function = function
    plan = planned(copy.deepcopy(model), features(WIDTH), 2)
    assert_equal(model, features(WIDTH), plan)
    assert is_split(plan) == split
