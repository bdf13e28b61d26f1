"""Code that decides by the length of its input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.length_comparisons import holds, parsed
from shardwright.planner.prepare import prepare
from shardwright.planner.search import traced_model
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests.planning import plan
from tests.ranks import run_ranks


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.most = 6
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)


class Long(MLP):
    """Below ten rows it takes a mean over what a rank has a part of."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        if x.shape[1] > self.most + 4:
            return self.down(h)
        return self.down(h * h.mean(-1, keepdim=True))


class Untraceable(Long):
    """Below ten rows it takes a way that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.most + 4:
            return self.down(self.up(x).relu())
        return self.down(self.up(x)) * sum(x.flatten().tolist())


class Raises(MLP):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 4:
            raise ValueError("too short")
        return self.down(self.up(x).relu())


class Broadcasts(MLP):
    """Comparisons with 1, and one whose outcome does not matter."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 1:
            x = x.contiguous()
        flag = x.shape[1] > 10 and self.most < 0
        h = self.up(x).relu()
        return h.sum() if flag else self.down(h)


def lengths_of(model: nn.Module) -> dict[str, str]:
    (call,) = plan(model, 2, args=(torch.randn(3, 19, 32).double(),)).calls
    return call.lengths


def assert_equal(split: nn.Module, model: nn.Module, rows: int) -> None:
    x = torch.randn(2, rows, 32, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(split(x), model(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("traced", [19, 5])
def test_both_outcomes_are_traced(traced: int) -> None:
    torch.manual_seed(0)
    model = Long().double()
    found = plan(model, 2, args=(torch.randn(3, traced, 32).double(),))
    assert not any(call.lengths for call in found.calls)

    def work(mesh: Mesh) -> None:
        split: Any = apply(copy.deepcopy(model), found, mesh)
        assert split.up.weight.to_local().shape[0] == 32
        for rows in (5, 10, 11, 40):
            assert_equal(split, model, rows)

    run_ranks(2, work)


class Steps(MLP):
    """A comparison that only calls of other lengths make, and one with a number itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        if x.shape[1] > 10:
            return self.down(h)
        if x.shape[1] >= 6:
            return self.down(h * h.mean(-1, keepdim=True))
        return self.down(h + h.amax(-1, keepdim=True))


def test_comparisons_behind_comparisons() -> None:
    torch.manual_seed(0)
    model = Steps().double()
    found = plan(model, 2, args=(torch.randn(3, 19, 32).double(),))
    assert not any(call.lengths for call in found.calls)

    def work(mesh: Mesh) -> None:
        split = apply(copy.deepcopy(model), found, mesh)
        for rows in (2, 5, 6, 10, 11, 40):
            assert_equal(split, model, rows)

    run_ranks(2, work)


class Block(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Numbered(nn.Module):
    """Its code depends on the index of a block, and on a length."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 10:
            x = x + 1
        for i, block in enumerate(self.blocks):
            x = block(x) * (2 if i == 3 else 1)
        return x


def test_blocks_that_are_numbered_are_not_folded_for_other_lengths() -> None:
    task = prepare(Numbered().double(), 2, args=(torch.randn(3, 19, 32).double(),))
    assert len(task.source.runs) == 2 and not task.folding.stacks


def test_refused_on_the_side_that_cannot_be_traced() -> None:
    torch.manual_seed(0)
    model = Untraceable().double()
    found = plan(model, 2, args=(torch.randn(3, 19, 32).double(),))
    assert list(found.calls[0].lengths) == ["x.shape[1] > (6 + 4)"]

    def work(mesh: Mesh) -> None:
        split = apply(copy.deepcopy(model), found, mesh)
        for rows in (11, 40):
            assert_equal(split, model, rows)
        with pytest.raises(UsageError, match=r"decides by a length: .* and x.shape\[1\] is 5"):
            split(torch.randn(2, 5, 32).double())

    run_ranks(2, work)


@pytest.mark.parametrize("kind", [Raises, Broadcasts])
def test_what_does_not_decide(kind: type[MLP]) -> None:
    assert lengths_of(kind().double()) == {}


def test_a_length_that_the_code_refuses_is_found_out_without_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And keeps no other length from being traced."""
    again: list[object] = []
    traced = traced_model._of_other_source
    monkeypatch.setattr(
        traced_model, "_of_other_source", lambda *a, **k: (again.append(a), traced(*a, **k))[1]
    )
    prepare(Raises().double(), 2, args=(torch.randn(3, 19, 32).double(),))
    assert not again
    prepare(Long().double(), 2, args=(torch.randn(3, 19, 32).double(),))
    assert again


def test_a_comparison_is_read_as_one_alone() -> None:
    assert holds("x.shape[1] * 2 > (6 + 4)", {"x.shape[1]": 6})
    assert not holds("x.shape[1] // 2 == 4", {"x.shape[1]": 6})
    for text in (
        "x.shape[1]",
        "f() > 1",
        "x.y[1] > 1",
        "1 < x.shape[0] < 3",
        "x.shape[1] ** 9 > 1",
    ):
        with pytest.raises(PlanError, match="compares no lengths"):
            parsed(text)


class Masked(MLP):
    """A mask of lengths it makes longer; another it takes as it is, by way of a mean."""

    config: Any = None
    dims: Callable[[Tensor], int] = staticmethod(lambda mask: mask.ndim)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.up(x).relu()
        if self.dims(attention_mask) == 2:
            if attention_mask.shape[1] < x.shape[1]:
                attention_mask = torch.nn.functional.pad(attention_mask, (0, 3))
            return self.down(h * attention_mask[:, :, None])
        return self.down(h * h.mean(-1, keepdim=True))


class MaskedByShape(Masked):
    dims = staticmethod(lambda mask: len(mask.shape))


@pytest.mark.parametrize("kind", [Masked, MaskedByShape])
@pytest.mark.parametrize("config", [None, object()])
def test_a_mask_of_other_dims_takes_another_path(config: Any, kind: type[Masked]) -> None:
    """But for those that `generate` makes: models of transformers take them as they are."""
    model, x = kind().double(), torch.randn(3, 19, 32).double()
    planned = plan(model, 2, args=(x, torch.ones(3, 19).bool()))
    assert "attention_mask.ndim == 2" in planned.calls[0].lengths
    model.config, mask = config, torch.rand(3, 19) > 0.3

    def rank(mesh: Mesh) -> None:
        split = apply(copy.deepcopy(model), planned, mesh)
        torch.testing.assert_close(split(x, mask), model(x, mask))
        if config is None:
            with pytest.raises(UsageError, match=r"attention_mask.ndim == 2 held"):
                split(x, mask[:, None, None])
        else:
            split(x, mask[:, None, None])
        with pytest.raises(UsageError, match=r"attention_mask.ndim == 2 held"):
            split(x, mask[:, None])

    run_ranks(2, rank)
