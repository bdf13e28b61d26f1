"""Tensors within nested values are found by the names that the planner gives them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from shardwright.errors import PlanError
from shardwright.planner.trace.record.boundaries import map_slots
from shardwright.runtime.slots import replace


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
