"""Loops that run as often as the length of an input says, and once or not at all in a trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.planner.equal import features
from tests.planner.mlps import WIDTH
from tests.ranks import run_ranks

TRACED = (3, 19)


class Loops(nn.Module):
    """A gradient that a later run leaves partial is summed where the first run took its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)

    def start(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())

    def step(self, y: Tensor) -> Tensor:
        return self.down(self.up(y).relu())


class Remainder(Loops):
    def forward(self, x: Tensor) -> Tensor:
        y = self.start(x)
        for _ in range(x.shape[1] % 3):
            y = self.step(y)
        return y


class NoneAtFirst(Loops):
    def forward(self, x: Tensor) -> Tensor:
        y = self.start(x)
        for _ in range(x.shape[1] // 20):
            y = self.step(y)
        return y


class Chunks(Loops):
    def forward(self, x: Tensor) -> Tensor:
        y = self.start(x)
        for _ in range(0, x.shape[1], 20):
            y = self.step(y)
        return y


class Backwards(Loops):
    def forward(self, x: Tensor) -> Tensor:
        y = self.start(x)
        for i in range(x.shape[1], 0, -20):
            y = self.step(y + i)
        return y


class Parts(Loops):
    """As models do that carry a memory from part to part."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.start(x[:, :1])
        for part in x.split(20, dim=1):
            y = self.step(y) + part.mean(1, keepdim=True)
        return y


class Own(Loops):
    """Its number of layers is no length, and code may ask whether something is a range."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = 1

    def forward(self, x: Tensor) -> Tensor:
        y, layers = self.start(x), range(self.layers)
        assert isinstance(layers, range)
        for _ in layers:
            y = self.step(y)
        return y


@pytest.mark.parametrize("kind", [Remainder, NoneAtFirst, Chunks, Backwards, Parts, Own])
@pytest.mark.parametrize("tp", [2, 3])
def test_other_numbers_of_runs(kind: type[Loops], tp: int) -> None:
    torch.manual_seed(0)
    model = kind().double()
    plan = planning.plan(copy.deepcopy(model), tp, args=features(WIDTH)(*TRACED), phase="train")
    assert any("@" in p.placement for m in plan.modules.values() for p in m.parameters.values())
    assert (len(plan.calls) == 1) == (kind is Own)
    given = [features(WIDTH)(2, n)[0] for n in (6, 7, 8, 40)]

    def use(local: nn.Module) -> dict[str, Tensor]:
        outputs = {}
        for x in given:
            outputs[f"{x.shape[1]}"] = y = local(x)
            y.square().sum().backward()
        grads = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        return {**outputs, **full_tensors(local, grads)}

    want = use(copy.deepcopy(model))
    for found in run_ranks(tp, lambda mesh: use(apply(copy.deepcopy(model), plan, mesh))):
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-9)


class Far(Loops):
    """No length that is traced gives another run."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.start(x)
        for _ in range(0, x.shape[1], 100_000):
            y = self.step(y)
        return y


def test_numbers_of_runs_that_cannot_be_traced_are_refused() -> None:
    model = Far().double()
    plan = planning.plan(model, 2, args=features(WIDTH)(*TRACED), phase="train")
    long = torch.randn(1, 1, WIDTH).double().expand(1, 100_001, WIDTH)
    with pytest.raises(UsageError, match=r"test_loop_lengths.py:\d+"):
        run_ranks(2, lambda mesh: apply(copy.deepcopy(model), plan, mesh)(long))
