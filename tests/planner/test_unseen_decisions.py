"""Code that decides by numbers which it gets off example inputs, where nobody sees it compare them.

For other inputs it may do something else. The split model does that too, or refuses.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from tests.planning import plan
from tests.ranks import run_ranks

SHORT, LONG = torch.tensor([[0, 1, 0, 1, 2, 0]]), torch.arange(20, 60).unsqueeze(0)


class Decides(nn.Module):
    """Below a bound it takes a relu of what a rank may have a part of, and above it a softmax."""

    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.of = of
        self.embed, self.up, self.down = nn.Embedding(64, 32), nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.up(self.embed(ids))
        return self.down(h.softmax(-1) if self.of(ids) else h.relu())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bound = 0
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, h: Tensor, bound: int = 0) -> Tensor:
        h = self.up(h)
        return self.down(h.softmax(-1) if max(bound, self.bound) > 100 else h.relu())


class Tells(nn.Module):
    def forward(self, ids: Tensor) -> dict[str, Any]:
        return {"sum": int(ids.sum()), "ids": ids * 2}


class Passes(Decides):
    """Other modules are told what was read."""

    def __init__(self, how: str) -> None:
        super().__init__(self.told)
        self.how, self.mlp, self.tells = how, Mlp(), Tells()

    def told(self, ids: Tensor) -> bool:
        return self.how == "returned" and self.tells(ids)["sum"] > 100

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "returned":
            return super().forward(ids)
        h, read = self.up(self.embed(ids)), int(ids.sum())
        if self.how == "attribute":
            self.mlp.bound = read
        return self.down(self.mlp(h, read if self.how == "argument" else 0))


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda ids: int(ids.sum()) > 100,
    "item": lambda ids: ids.sum().item() > 100,
    "list": lambda ids: sum(ids.flatten().tolist()) > 100,
    "max": lambda ids: max(ids[0]) > 10,
    "unique": lambda ids: len(ids.unique()) > 3,
}
LENGTHS: dict[str, Callable[[Tensor], Any]] = {
    "positions": lambda ids: torch.arange(ids.shape[1]).max() > 20,
    "positions as a number": lambda ids: int(torch.arange(ids.shape[1]).sum()) > 100,
    "a tensor of a length": lambda ids: torch.tensor([ids.shape[1]]).item() > 20,
    "selected": lambda ids: len((torch.arange(ids.shape[1]) > 20).nonzero()) > 0,
    "float": lambda ids: ids.shape[1] / 2 > 10,
    "rounded": lambda ids: math.ceil(ids.shape[1] / 8) > 3,
    "int of a quotient": lambda ids: int(ids.shape[1] / 8) > 3,
    "root": lambda ids: math.sqrt(ids.shape[1]) > 5,
    "int of it": lambda ids: int(ids.shape[1]) > 20,
    "len": lambda ids: len(ids[0]) > 20,
    "rest": lambda ids: ids.shape[1] % 32 > 6,
    "bits": lambda ids: ids.shape[1] >> 5,
    "truth": lambda ids: ids.shape[1] - 6,
    "text": lambda ids: f"{ids.shape[1]}" == "40",
    "elements": lambda ids: ids.numel() > 20,
    "in a tuple": lambda ids: ids.shape[1] in (40, 41),
    "in a set": lambda ids: ids.shape[1] in {40, 41},
    "shape": lambda ids: ids.shape == (1, 40),
    "rows of a view": lambda ids: ids.reshape(-1, 1).shape[0] > 20,
}


def outcomes(model: nn.Module) -> list[float | str]:
    """Return how far a split copy is from the model for the two inputs, or what it says."""
    model = model.double().eval()
    made = plan(copy.deepcopy(model), tp=2, args=(SHORT,), objective="memory")
    found: list[float | str] = []
    for ids in (SHORT, LONG):
        expected = model(ids).detach()

        def run(mesh: Any, ids: Tensor = ids) -> Tensor:
            return apply(copy.deepcopy(model), made, mesh)(ids)

        try:
            found.append(max(float((y.detach() - expected).abs().max()) for y in run_ranks(2, run)))
        except UsageError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("name", [*VALUES, *LENGTHS])
def test_other_inputs_are_right_or_refused(name: str) -> None:
    torch.manual_seed(0)
    same, other = outcomes(Decides((VALUES | LENGTHS)[name]))
    assert isinstance(same, float) and same < 1e-9
    assert "decides by a length" in other if isinstance(other, str) else other < 1e-9


@pytest.mark.parametrize("how", ["returned", "attribute", "argument"])
def test_what_is_read_may_be_told_to_other_modules(how: str) -> None:
    torch.manual_seed(0)
    same, other = outcomes(Passes(how))
    assert isinstance(same, float) and same < 1e-9
    if how == "argument":
        assert "argument 'bound' of 'mlp' is 1580" in str(other)
    else:
        assert isinstance(other, float) and other < 1e-9


def test_lengths_of_parameters_do_not_count() -> None:
    """They are the same in every call."""
    model = Decides(lambda ids: False)
    model.of = lambda ids: math.sqrt(model.embed(ids).shape[-1]) < 2
    made = plan(model.double(), tp=2, args=(SHORT,), objective="memory")
    assert max(made.predicted.parameter_bytes) < 0.52 * made.predicted.unsharded_bytes
