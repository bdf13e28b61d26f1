"""Values that are the same whatever the data are known while a model is traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from shardwright.planner.trace.record.fake_mode import LikeReal
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.trials import Trial, Trials
from tests.planner.equal import assert_equal, features, planned
from tests.planner.test_unused import WIDTH, Mlp, is_split
from tests.planning import trace


class Chunked(nn.Module):
    """Adds to each place what all places before its chunk of four give; no data says where."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        starts = torch.tensor(list(range(0, 40, 4))).to(x.device)
        ends = nn.functional.pad(starts[1:], (0, 1), value=40)
        inside = (places[:, None] >= starts) & (places[:, None] < ends)
        chunk = inside.nonzero()[:, 1]
        chunk[chunk > 7] = 0
        seen = places < starts[chunk][:, None]
        return x + seen.to(x.dtype) @ self.mlp(x)


class Asks(Chunked):
    """How many places there are decides; so many are seen, whatever the data."""

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.arange(x.shape[1]).clamp(max=12).unique()
        if seen.max().item() > 12 or not (seen == 3).any() or seen.sum().tolist() < 0:
            return x
        return super().forward(x) * float(seen[-1])


class Filled(Chunked):
    """It fills an uninitialized tensor with offsets, and takes rows by them."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([x.shape[1] - 2, 2])
        offsets = torch.empty(lengths.size(), dtype=lengths.dtype)
        offsets[0] = 0
        offsets[1:] = lengths.cumsum(0)[:-1]
        last = int(offsets[1])
        return super().forward(x[:, [last, last + 1, *range(last)]])


class OfData(Chunked):
    """It computes with a number that only data has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (x > 0).sum().item()


class Top(nn.Module):
    """A module with another in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


@pytest.mark.parametrize("make", [Chunked, Asks, Filled])
def test_what_is_asked_of_constants(make: Callable[[], nn.Module]) -> None:
    """Such a module is traced and split, and right for other lengths than the traced one."""
    model = Top(make()).double().eval()
    plan = planned(model, features(WIDTH), 2)
    assert is_split(plan, "inner.mlp.up.weight")
    assert not any(op.startswith("module") for op in plan.opaque)
    assert_equal(model, features(WIDTH), plan)


def test_what_is_asked_of_data() -> None:
    """That module stays opaque."""
    plan = planned(Top(OfData()).double().eval(), features(WIDTH), 2)
    assert "module OfData" in plan.opaque and not is_split(plan, "inner.mlp.up.weight")


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_written_into(kept: bool) -> None:
    """A value is that after the write; what data is written into has none, nor have its views."""
    fake = LikeReal()
    with fake:
        data = (
            torch.zeros(2, dtype=torch.int64) if kept else fake.from_tensor(torch.zeros(2).long())
        )
        places = torch.arange(6)
        view = places.view(2, 3)[1]
        places[2:4] = data
        if kept:
            assert view.nonzero().shape == (2, 1)
        else:
            with pytest.raises(DynamicOutputShapeException):
                view.nonzero()


def test_what_is_drawn_or_large_has_no_value() -> None:
    """Nor does what is made of it."""
    with LikeReal():
        for x in (torch.randperm(5), torch.ones(300, 300), torch.empty(3).fill_(1).cos()):
            with pytest.raises(DynamicOutputShapeException):
                (x > 0).nonzero()


def test_what_masks_of_one_length_select() -> None:
    """It is not kept by their lengths from a trial: they may select more or fewer rows."""

    class Selects(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(3, device=x.device)
            return torch.cat([x[places < rows] for rows in (2, 1, 3)])

    x = torch.empty(3, 8, device="meta")
    assert Trials(Selects()).attempt(Run("", (x,), {})) is Trial.RUNS
    graph = trace(Selects(), (x,), {})
    rows = [op.call.results[0][0] for op in graph.ops if op.call.op == "index"]
    assert rows == [2, 1, 3]
