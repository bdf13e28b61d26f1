"""Weights that no op can use in parts: held in parts, and gathered as they are read."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from shardwright.errors import InfeasibleError
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import ParameterPlan, Plan
from tests.planner.equal import Inputs, assert_equal, features, ids, planned
from tests.planner.mlps import WIDTH, Mlp


class Mixed(nn.Module):
    """Takes its input by shares that its own code makes of a product: that is no sum."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.softmax(linear(x, self.shares), -1)


class Between(nn.Module):
    """Shares between two MLPs, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second, self.behind = Mlp(), Mixed(), Mlp(), Mixed()

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.second(self.between(self.first(x))))


class Looked(nn.Module):
    """A table that is read as numbers, too, so that it is no table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mixed = nn.Embedding(12, WIDTH), Mixed()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mixed(self.table(tokens)) * torch.softmax(self.table.weight.sum(0), -1)


class Asking(Mixed):
    """Its data say how often it reads."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.sum() > 0)):
            x = super().forward(x)
        return x


class Asked(nn.Module):
    """An MLP beside such a module."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.asking = Mlp(), Asking()

    def forward(self, x: Tensor) -> Tensor:
        return self.asking(self.mlp(x))


def entry(plan: Plan, name: str) -> ParameterPlan | None:
    """What the plan says of a parameter."""
    module, _, leaf = name.rpartition(".")
    spec = plan.module(module)
    return spec.parameters.get(leaf) if spec else None


def is_gathered(plan: Plan, name: str) -> bool:
    """Whether it is held in parts and used whole."""
    found = entry(plan, name)
    if found is None or found.use is None:
        return False
    return bool(parse(found.placement).meshes) and not parse(found.use).meshes


@pytest.mark.parametrize(
    ("make", "inputs", "name"),
    [
        (Between, features(WIDTH), "between.shares"),
        (Between, features(WIDTH), "behind.shares"),
        (Looked, ids(12), "mixed.shares"),
    ],
)
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_equals_the_whole_model(make: type[nn.Module], inputs: Inputs, name: str, tp: int) -> None:
    """In values and gradients, and in what it was predicted to send."""
    model = make().double()
    plan = planned(model, inputs, tp)
    assert is_gathered(plan, name)
    assert_equal(model, inputs, plan)


def test_a_gather_is_counted_each_time() -> None:
    """And its bytes are those that a rank holds: the largest part."""
    plan = planned(Between().double(), features(WIDTH), 2)
    found = Counter({c.kind: c.count for c in plan.predicted.collectives if c.phase == "forward"})
    assert found == {"all_gather": 2, "all_reduce": 2}
    gathers = next(c for c in plan.predicted.collectives if c.kind == "all_gather")
    assert gathers.bytes == 2 * 8 * WIDTH * WIDTH // 2


class Large(Mlp):
    """Beside this one such weights are few."""

    hidden = kept = 64 * WIDTH


class Beside(nn.Module):
    """A large MLP, and shares."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.mixed = Large(), Mixed()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.mlp(x))


def test_few_stay_whole() -> None:
    """Within the slack of bytes they are not worth the time, but where a budget asks for them."""
    model = Beside().double()
    plan = planned(model, features(WIDTH), 2)
    assert entry(plan, "mixed.shares") is None
    assert plan.predicted.memory is not None
    budget = plan.predicted.memory.total - 8 * WIDTH * WIDTH // 4
    tight = planned(model, features(WIDTH), 2, memory=budget)
    assert is_gathered(tight, "mixed.shares")
    assert_equal(model, features(WIDTH), tight)


def test_a_pin_keeps_them_whole() -> None:
    pins = {"between": "replicate"}
    plan = planned(Between().double(), features(WIDTH), 2, pins=pins)
    assert entry(plan, "between.shares") is None
    assert is_gathered(plan, "behind.shares")


def test_what_data_choose_is_not_gathered() -> None:
    """A rank that chose otherwise would wait for ever."""
    model = Asked().double()
    plan = planned(model, features(WIDTH), 2)
    assert entry(plan, "asking.shares") is None
    assert_equal(model, features(WIDTH), plan)
    assert plan.predicted.memory is not None
    with pytest.raises(InfeasibleError):
        planned(model, features(WIDTH), 2, memory=plan.predicted.memory.total - 8 * WIDTH)
