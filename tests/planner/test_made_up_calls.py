"""A made-up call that cannot be traced does not change how the calls before it are traced."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.trace import folded_trace
from shardwright.planner.trace.opaque import opaque_modules
from shardwright.planner.trace.runs.run import Run, RunRefused
from shardwright.planner.trace.trace_runs import trace_runs
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests.planner.equal import features, planned
from tests.planner.mlps import WIDTH, Mlp
from tests.ranks import run_ranks


class Guarded(Mlp):
    """Needs data unless it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            x = x + len(torch.unique(x))
        return super().forward(x)


class Lengths(Mlp):
    """Reads numbers off data that say what belongs together."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = x[0, :2, 0].long()
        parts = x.flatten(0, 1).split(lengths.tolist())
        return super().forward(torch.cat([part + 1 for part in parts]))


class Asked(nn.Module):
    """Does more if it is asked to, which cannot be traced."""

    def __init__(self, inner: nn.Module, unique: bool) -> None:
        super().__init__()
        self.inner, self.unique = inner, unique

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        y = self.inner(x)
        if more and self.unique:
            return torch.unique(y)
        if more:
            raise ValueError("there is no more")
        return y


@pytest.mark.parametrize(
    "inner, unique, why",
    [(Guarded, False, "ValueError: there is no more"), (Lengths, True, "_unique2")],
)
def test_the_call_is_refused_for_its_own_reason(
    monkeypatch: pytest.MonkeyPatch, inner: type[nn.Module], unique: bool, why: str
) -> None:
    model = Asked(inner(), unique).to("meta")
    x = torch.empty(3, 19, WIDTH, device="meta")
    runs = [Run("", (x,), {}), Run("", (x,), {"more": True}, priced=False)]
    assert not trace_runs(model, runs[:1]).untraced
    monkeypatch.setattr(opaque_modules, "outcome", lambda *_: pytest.fail("tried on data"))
    with pytest.raises(RunRefused, match=why) as refused:
        trace_runs(model, runs)
    assert refused.value.behind == 1


def test_a_call_that_the_user_gave_may_cost_more() -> None:
    """Then the module that cannot be traced without export stays whole."""

    class Loud(Asked):
        def forward(self, x: Tensor, more: bool = False) -> Tensor:
            if more and torch.compiler.is_exporting():
                raise ValueError("not exported")
            return self.inner(x)

    model = Loud(Guarded(), False).to("meta")
    x = torch.empty(3, 19, WIDTH, device="meta")
    given = Run("", (x,), {"more": True}, priced=False, given=True)
    assert trace_runs(model, [Run("", (x,), {}), given]).untraced == {"inner"}
    with pytest.raises(RunRefused, match="not exported"):
        trace_runs(model, [Run("", (x,), {}), given._replace(given=False)])


class Scaled(Mlp):
    """Does something else in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else 2 * x)


def test_training_mode_of_a_large_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is only traced if the plan is for training, and refused otherwise."""
    monkeypatch.setattr(folded_trace, "MAX_OPS_TO_TRACE_IN_TRAINING", 1)
    model, inputs = Scaled().double().eval(), features(WIDTH)
    with_training = planned(model, inputs, 2, phase="train")
    without = planned(model, inputs, 2)
    want = model.train()(*(given := inputs(2, 7)))

    def rank(mesh: Mesh) -> None:
        local = apply(copy.deepcopy(model), with_training, mesh).train()
        torch.testing.assert_close(local(*given), want)
        with pytest.raises(UsageError, match="proven for eval mode alone"):
            apply(copy.deepcopy(model), without, mesh).train()(*given)

    run_ranks(2, rank)


class Numbered(nn.Module):
    """Its code depends on the index of a block, and on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(9))
        self.tap = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in (4, 6):
                x = x + self.tap(x)
        return self.tap(x if self.training else 2 * x)


@pytest.mark.parametrize("most", [20, 1000])
def test_training_mode_of_a_trace_that_is_large_without_folding(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(folded_trace, "MAX_OPS_TO_TRACE_IN_TRAINING", most)
    model, inputs = Numbered().double().eval(), features(WIDTH)
    plan = planned(model, inputs, 2)
    given = inputs(2, 7)
    want = [copy.deepcopy(model).train(mode)(*given) for mode in (False, True)]

    def rank(mesh: Mesh) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        torch.testing.assert_close(local(*given), want[False])
        if most == 1000:
            torch.testing.assert_close(local.train()(*given), want[True])
        else:
            with pytest.raises(UsageError, match="proven for eval mode alone"):
                local.train()(*given)

    run_ranks(2, rank)
