"""Models that take objects: dataclasses, frozen or with slots, and custom classes, also changed."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.planner.trace.model.argument_trees import tree_leaves, tree_map
from tests import planning
from tests.planner.equal import assert_equal

WIDTH = 24


@dataclass
class Batch:
    x: Tensor
    rows: Tensor
    more: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    rows: Tensor


class Data:
    def __init__(self, x: Tensor, rows: Tensor) -> None:
        self.x, self.rows, self.itself = x, rows, self


class Encoding(UserDict[str, Tensor]):
    def __init__(self, x: Tensor, rows: Tensor) -> None:
        super().__init__({"x": x, "rows": rows})

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError
        return self.data[name]


class Seen:
    """It is empty at first, and has what the model puts in."""

    def __init__(self, x: Tensor, rows: Tensor) -> None:
        self.given, self.found = [x, rows], list[Tensor]()

    @property
    def x(self) -> Tensor:
        self.found.append(self.given[0])
        return self.found[-1]

    @property
    def rows(self) -> Tensor:
        return self.given[1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, batch: Any, scale: float = 1.0) -> Tensor:
        return self.down(F.gelu(self.up(batch.x[batch.rows]))) * scale


def inputs(kind: Callable[[Tensor, Tensor], Any]) -> Callable[[int, int], tuple[Any, ...]]:
    def make(batch: int, length: int) -> tuple[Any, ...]:
        x = torch.randn(length, WIDTH, dtype=torch.float64)
        return (kind(x, torch.arange(batch) % length),)

    return make


@pytest.mark.parametrize("kind", [Batch, Frozen, Data, Encoding, Seen])
def test_equals_the_whole_model(kind: type) -> None:
    model, make = Model().double(), inputs(kind)
    plan = planning.plan(model, 2, args=make(3, 19), batch=2, seq=7)
    assert plan.modules["up"].parameters["weight"].placement == "48@tp, 24"
    assert_equal(model, make, plan, collectives=False)


def test_by_name_alone() -> None:
    (batch,) = inputs(Batch)(3, 19)
    plan = planning.plan(Model().double(), 2, args=None, kwargs={"batch": batch})
    assert plan.modules["up"].parameters["weight"].placement == "48@tp, 24"


class Adds(Model):
    """It adds to what it is given: what it adds must be whole."""

    def forward(self, batch: Any, scale: float = 1.0) -> Tensor:
        batch["h"] = self.up(batch["x"])
        return self.down(F.gelu(batch["h"]))


def test_a_mapping_that_the_code_adds_to() -> None:
    def make(batch: int, length: int) -> tuple[Any, ...]:
        return (OrderedDict(x=torch.randn(batch, length, WIDTH, dtype=torch.float64)),)

    model = Adds().double()
    plan = planning.plan(model, 2, args=make(3, 19), batch=2, seq=7)
    assert_equal(model, make, plan, collectives=False)


def test_objects_are_copied_and_those_given_stay() -> None:
    data = Data(torch.ones(2), torch.zeros(2))
    made = tree_map(lambda v: v + 1, {"a": data, "b": [data]})
    assert made["a"] is made["b"][0] is made["a"].itself is not data
    assert [v.tolist() for v in tree_leaves(made)] == [[2, 2], [1, 1]]
    assert [v.tolist() for v in tree_leaves(data)] == [[1, 1], [0, 0]]
