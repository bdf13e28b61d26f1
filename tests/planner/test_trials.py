"""Calls are tried with one block of each kind first, and with all blocks where that may help."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.trace.runs import trials
from shardwright.planner.trace.runs.further_runs import wishes
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.trials import Trial, Trials

DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Stack(nn.Module):
    """Looks at a block by its number, if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor, last: int = 0) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.blocks[last](x)


def given(width: int, last: int = 0) -> Run:
    return Run("", (), {"x": torch.empty(3, width, device="meta"), "last": last})


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of blocks in each trial."""
    blocks: list[int] = []
    run = trials.run_on_fake
    monkeypatch.setattr(
        trials,
        "run_on_fake",
        lambda module, *how: (blocks.append(len(module.blocks)), run(module, *how))[1],
    )
    return blocks


def test_a_call_that_needs_all_blocks_gets_them(tried: list[int]) -> None:
    of = Trials(Stack().to("meta"))
    assert of.attempt(given(DIM)) is of.attempt(given(DIM, last=4)) is Trial.RUNS
    assert tried == [2, 2, 5]


def test_where_a_call_failed_with_all_blocks_others_are_not_tried_with_them(
    tried: list[int],
) -> None:
    """Only there: what fails elsewhere may need all blocks."""
    of = Trials(Stack().to("meta"))
    assert [of.attempt(given(width)) for width in (DIM + 1, DIM + 2)] == [Trial.FAILS] * 2
    assert tried == [2, 5, 2]
    assert of.attempt(given(DIM, last=4)) is Trial.RUNS
    assert tried[3:] == [2, 5]


def test_a_model_without_blocks_is_tried_once(tried: list[int]) -> None:
    model = Stack().to("meta")
    model.blocks = model.blocks[:2]
    assert Trials(model).attempt(given(DIM + 1)) is Trial.FAILS
    assert tried == [2]


def test_alternatives_like_a_refused_one_are_left_out_if_they_fail() -> None:
    of = Trials(Stack().to("meta"))
    wide, wider, right = given(DIM + 1), given(DIM + 2), given(DIM)
    other = Run("", (), {"x": torch.empty(3, DIM + 1, device="meta")})
    assert of.without_refused((wide, wider, right, other)) == (right, other)
    assert of.left([(wide,), (wider, right, other)]) == [(right, other)]


def test_of_alternatives_that_run_only_the_refused_one_is_left_out() -> None:
    of = Trials(Stack().to("meta"))
    refused, right = given(DIM), given(DIM)
    assert of.without_refused((refused, right)) == (right,)
    assert of.left([(refused,)]) == [(refused,)]


class Scored(nn.Module):
    """Takes features, and labels with one number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, DIM)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        out = self.head(features).mean(1)
        return out if labels is None else nn.functional.cross_entropy(out, labels)


@pytest.mark.parametrize(("dims", "labelled"), [(3, True), (4, False)])
def test_labels_that_a_loss_refuses_are_not_traced(dims: int, labelled: bool) -> None:
    """With a dim more the loss takes labels of two dims."""
    features = torch.empty(*(3, 5, 7)[: dims - 1], DIM, device="meta")
    found = wishes(Scored().to("meta"), {"features": features})
    assert any("labels" in run.kwargs for wish in found for run in wish) is labelled
