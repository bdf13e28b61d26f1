"""Calls with optional arguments that turn on parts of a model are made up, traced and right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ
from shardwright.planner.prove.prover import Prover
from shardwright.planner.trace.model.source import read_source
from tests import planning
from tests.planner.test_unused import TOKENS, WIDTH, Config, Mlp, is_split
from tests.ranks import run_ranks

AHEAD = 5


class Forecaster(nn.Module):
    """It looks ahead if it is told how, and twice if it is told to be fine."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(hidden_size=WIDTH, prediction_length=AHEAD)
        self.embed, self.mlp, self.second, self.ahead = (
            nn.Embedding(TOKENS, WIDTH),
            Mlp(),
            Mlp(),
            Mlp(),
        )
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        future_values: Tensor | None = None,
        future_shift: Tensor | None = None,
        fine: bool = False,
    ) -> Tensor:
        r"""
        future_values (`torch.FloatTensor` of shape `(batch_size, prediction_length, hidden_size)`):
            What is to come.
        future_shift (`torch.FloatTensor` of shape `(batch_size, 1, hidden_size)`, *optional*):
            By how much it is off.
        """
        x = self.mlp(self.embed(input_ids))
        if future_values is not None:
            assert future_shift is not None
            x = x + self.ahead(future_values + future_shift).mean(1, keepdim=True)
        return self.head(self.second(x) if fine else x)


class Counts(Mlp):
    """Its code reads the values of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * sum(n > 0 for n in x.flatten().tolist())


class Reads(Forecaster):
    def __init__(self) -> None:
        super().__init__()
        self.second, self.ahead = nn.Identity(), Counts()  # type: ignore[assignment]


def model(cls: type[Forecaster] = Forecaster) -> nn.Module:
    torch.manual_seed(3)
    return cls().double().eval()


def test_calls_with_a_switch_and_with_arguments_that_belong_together() -> None:
    """Both arguments that begin with the same word are needed; the docs say their shapes."""
    source = read_source(model())
    assert [run.module for run in source.more] == ["", ""]
    switched, longer = (run.kwargs for run in source.more)
    assert switched["fine"] is True and not longer.keys() & {"fine"}
    assert longer["future_values"].shape == (TRACE_BATCH, AHEAD, WIDTH)
    assert longer["future_shift"].shape == (TRACE_BATCH, 1, WIDTH)
    assert source.kwargs["input_ids"].shape == (TRACE_BATCH, TRACE_SEQ)


def test_parts_that_are_turned_on_are_split_and_right() -> None:
    """Each call by itself; one with both was not traced, and is refused."""
    whole = model()
    plan: Plan = planning.plan(whole, tp=2)
    for name in ("mlp", "second", "ahead"):
        assert is_split(plan, f"{name}.up.weight") and is_split(plan, f"{name}.down.weight")
    assert Prover(whole).prove(plan).plan == plan
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, TOKENS, (2, 7), generator=g)
    future: dict[str, Any] = {
        "future_values": torch.randn(2, AHEAD, WIDTH, generator=g).double(),
        "future_shift": torch.randn(2, 1, WIDTH, generator=g).double(),
    }
    calls = [{}, {"fine": True}, future]
    want = [whole(ids, **more) for more in calls]
    torch.stack([out.square().sum() for out in want]).sum().backward()
    grads = {n: p.grad for n, p in whole.named_parameters()}

    def run(mesh: Any) -> None:
        local = shardwright.apply(copy.deepcopy(whole), plan, mesh)
        local.zero_grad()
        got = [local(ids, **more) for more in calls]
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
        torch.stack([out.square().sum() for out in got]).sum().backward()
        mine = shardwright.full_tensors(local, {n: p.grad for n, p in local.named_parameters()})
        torch.testing.assert_close(mine, grads, atol=1e-9, rtol=1e-9)
        with pytest.raises(UsageError, match="fine and future_shift and future_values"):
            local(ids, fine=True, **future)

    run_ranks(2, run)


def test_a_call_that_depends_on_data_is_not_made_up() -> None:
    """What would then stay whole may be split in the plain call."""
    assert read_source(model(Reads)).more == ()
