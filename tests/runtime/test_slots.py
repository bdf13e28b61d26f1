"""Tensors within nested values are found by the names that the planner gives them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from shardwright.errors import PlanError
from shardwright.planner.trace.record.boundaries import map_slots
from shardwright.runtime.api import apply
from shardwright.runtime.slots import replace
from tests import planning
from tests.ranks import run_ranks


class Pair(NamedTuple):
    left: Tensor
    right: Any


def value() -> dict[str, Any]:
    pair = Pair(torch.zeros(1), [torch.zeros(1), torch.zeros(1)])
    return {"pair": pair, "output": BaseModelOutput(last_hidden_state=torch.zeros(1))}


def slots(of: Any) -> dict[str, float]:
    out: dict[str, float] = {}

    def note(x: Tensor, slot: str) -> Tensor:
        out[slot] = float(x)
        return x

    map_slots(of, "", note)
    return out


def test_every_slot_of_the_planner_is_found() -> None:
    for slot in slots(value()):
        changed = replace(value(), tuple(slot.split(".")), lambda x: x + 1)
        assert slots(changed) == {s: float(s == slot) for s in slots(value())}
        assert isinstance(changed["pair"], Pair)


def test_a_name_that_a_tuple_does_not_have() -> None:
    with pytest.raises(PlanError, match="call with return_dict=True"):
        replace(value(), ("pair", "middle"), lambda x: x)


@dataclass
class Output(ModelOutput):
    first: Tensor | None = None
    second: Tensor | None = None
    third: Tensor | None = None


class Fills(nn.Module):
    """Returns an output with keys in another order than its fields, and one that is no field."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Output:
        h = self.up(x)
        out = Output(first=self.down(h.relu()))
        for name, value in {"third": h.sin(), "more": h.tanh(), "second": h.cos()}.items():
            out[name] = value.sum(-1, keepdim=True)  # on ranks: a term of it
        return out


class Counts(nn.Module):
    """Reads such an output by number."""

    def __init__(self) -> None:
        super().__init__()
        self.fills = Fills()

    def forward(self, x: Tensor) -> Tensor:
        out = self.fills(x)
        return out[0] + out[1] + 2 * out[2].relu() + 3 * out[3].relu()


@pytest.mark.parametrize("kind", [Fills, Counts])
def test_outputs_keep_the_order_of_their_keys(kind: type[nn.Module]) -> None:
    """Code that reads them by number gets the same on ranks."""
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(2, 7, 8, dtype=torch.float64)
    pins = {("up" if kind is Fills else "fills.up") + ".weight": "shard:0"}
    plan = planning.plan(model, 2, args=(torch.randn(3, 19, 8, dtype=torch.float64),), pins=pins)
    want = model(x)
    for got in run_ranks(2, lambda mesh: apply(copy.deepcopy(model), plan, mesh)(x)):
        if kind is Fills:
            assert [*got] == [*want] == ["first", "third", "more", "second"]
            got, wanted = torch.cat(got.to_tuple(), -1), torch.cat(want.to_tuple(), -1)
        else:
            wanted = want
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


def test_outputs_are_rebuilt_in_order() -> None:
    out = Output(first=torch.zeros(1))
    out["third"] = torch.zeros(1)
    out["more"] = torch.zeros(1)
    out["second"] = torch.zeros(1)
    changed = replace(out, ("second",), lambda x: x + 1)
    assert [*changed] == ["first", "third", "more", "second"]
    assert float(changed[3]) == float(changed.second) == 1


class Named(OrderedDict[str, Tensor]):
    """Of nobody's fields."""


@pytest.mark.parametrize("kind", [dict, OrderedDict, Named])
def test_dicts_are_rebuilt_in_their_class_and_order(kind: type[dict[str, Tensor]]) -> None:
    given = kind({"b": torch.zeros(1), "a": torch.zeros(1)})
    changed = replace(given, ("a",), lambda x: x + 1)
    assert type(changed) is kind and [*changed] == ["b", "a"] and float(changed["a"]) == 1
