"""Rows that a mask of data selects go through modules that are split; nobody asks how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.planner.equal import assert_equal, planned
from tests.planner.mlps import WIDTH, Mlp

KINDS = 3


class OfSequences(nn.Module):
    """Each sequence goes through the module of its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.each = nn.ModuleList(Mlp() for _ in range(KINDS))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for kind, module in enumerate(self.each):
            mask = self.mask(kinds, kind)
            out[mask] = module(self.norm(x)[mask])
        return x + out

    def mask(self, kinds: Tensor, kind: int) -> Tensor:
        return kinds[:, 0] == kind


class OfTokens(OfSequences):
    """Each token does."""

    def mask(self, kinds: Tensor, kind: int) -> Tensor:
        return kinds == kind


class OfPlaces(OfSequences):
    """The same places of all sequences."""

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        mask = kinds[0] == 1
        picked = self.each[0](x[:, mask]).sum(1, keepdim=True)
        return x + picked + sum(module(x) for module in self.each[1:])


class Counts(OfSequences):
    """How many there are decides."""

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        rows = x[self.mask(kinds, 1)]
        return x + self.each[0](x) if self.none(rows) else x + self.each[1](x)

    def none(self, rows: Tensor) -> bool:
        return rows.shape[0] == 0


class CountsTokens(Counts):
    """The same of a mask of two dims."""

    def mask(self, kinds: Tensor, kind: int) -> Tensor:
        return kinds == kind


class Lengths(Counts):
    def none(self, rows: Tensor) -> bool:
        return len(rows) == 0


class Elements(Counts):
    def none(self, rows: Tensor) -> bool:
        return not rows.numel()


class Joined(Counts):
    """With others, or without some."""

    def none(self, rows: Tensor) -> bool:
        return torch.cat([rows, rows[:1]]).shape[0] < 2


class Sliced(Counts):
    def none(self, rows: Tensor) -> bool:
        return rows[1:].shape[0] < 1


def inputs(batch: int, seq: int) -> tuple[Any, ...]:
    """Activations, and kinds: of the first two where there are three."""
    return torch.randn(batch, seq, WIDTH).double(), torch.randint(KINDS - 1, (batch, seq))


@pytest.mark.parametrize("make", [OfSequences, OfTokens, OfPlaces])
def test_modules_of_rows_that_data_selects_are_split(make: Callable[[], nn.Module]) -> None:
    """All of them, and right where one gets no row."""
    model = make().double()
    plan = planned(model, inputs, 2)
    assert not any(op.startswith("module") for op in plan.opaque)
    assert max(plan.predicted.parameter_bytes) < 0.7 * plan.predicted.unsharded_bytes
    assert_equal(model, inputs, plan, collectives=False)  # their bytes are those of the rows


@pytest.mark.parametrize("make", [Counts, CountsTokens, Elements])
@pytest.mark.parametrize("kind", [0, 1])
def test_code_may_ask_whether_there_are_any(make: Callable[[], nn.Module], kind: int) -> None:
    """It is right whichever way it goes on from there."""

    def given(batch: int, seq: int) -> tuple[Any, ...]:
        return inputs(batch, seq)[0], torch.full((batch, seq), kind)

    model = Around(make()).double()
    assert_equal(model, given, planned(model, given, 2), collectives=False)


@pytest.mark.parametrize("make", [Lengths, Joined, Sliced])
def test_what_asks_how_many_there_are_depends_on_data(make: Callable[[], nn.Module]) -> None:
    model = Around(make()).double()
    assert f"module {make.__name__}" in planned(model, inputs, 2).opaque


class Around(nn.Module):
    """A root, which is never opaque."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.mlp = inner, Mlp()

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        return self.mlp(self.inner(x, kinds))
