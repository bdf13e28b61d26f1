"""Batch norms split by channel: their running statistics are split as well, and trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import assert_equal, planned
from tests.predicted import predicted
from tests.ranks import run_ranks

CHANNELS, INNER = 6, 10


class Convolved(nn.Module):
    """The convolution module of a conformer: over time, by channel, between two that mix these."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Conv1d(CHANNELS, 2 * INNER, 1), nn.GLU(dim=1)
        self.depth = nn.Conv1d(INNER, INNER, 3, padding=1, groups=INNER, bias=False)
        self.norm = nn.BatchNorm1d(INNER)
        self.down = nn.Conv1d(INNER, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.depth(self.gate(self.up(x.transpose(1, 2)))))
        return x + self.down(torch.nn.functional.silu(hidden)).transpose(1, 2)


def inputs(batch: int, seq: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, seq, CHANNELS, dtype=torch.float64),)


def made() -> tuple[Convolved, Plan]:
    """A model in double, its statistics not those it starts with, and its plan on two ranks."""
    torch.manual_seed(0)
    model = Convolved().double()
    model(*inputs(4, 5))
    model.eval()
    return model, planned(model, inputs, 2)


def test_equals_the_whole_model() -> None:
    model, plan = made()
    parameters = plan.modules["norm"].parameters
    assert {name for name, p in parameters.items() if "@" in p.placement} == {
        "weight", "bias", "running_mean", "running_var",
    }  # fmt: skip
    assert all(p.use is None for p in parameters.values())
    assert predicted(plan, "forward").keys() == {"all_reduce"}
    assert_equal(model, inputs, plan)


def test_training_moves_them() -> None:
    """Planned to be run, then trained: what is saved after it are the whole model's statistics."""
    model, plan = made()
    batches = [inputs(3, 7) for _ in range(3)]

    def train(local: nn.Module) -> list[Tensor]:
        local.train()
        outputs = [local(*batch) for batch in batches]
        local.eval()
        return [*outputs, local(*batches[0])]

    def rank(mesh: Mesh) -> tuple[list[Tensor], dict[str, Tensor]]:
        local = apply(copy.deepcopy(model), plan, mesh)
        outputs = train(local)
        return outputs, full_tensors(local, dict(local.named_buffers()))

    whole = copy.deepcopy(model)
    want = train(whole)
    for outputs, buffers in run_ranks(2, rank):
        for a, b in zip(outputs, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        for name, buffer in whole.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, rtol=1e-12, atol=1e-12)
            assert not torch.equal(buffer, dict(model.named_buffers())[name])


def test_code_in_no_call_sees_them_whole() -> None:
    """Sizes and norms, in hooks too; calls go on with what it writes or puts there."""
    model, plan = made()
    want: Any = copy.deepcopy(model)
    x = inputs(2, 5)
    want.norm.running_mean *= 2
    want.norm.running_var = want.norm.running_var * 3
    expected = want(*x)
    want.norm.reset_running_stats()
    reset, norm = want(*x), model.get_buffer("norm.running_mean").norm()

    def rank(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        seen: list[Any] = []
        hook = local.norm.register_forward_hook(lambda m, *_: seen.append(m.running_mean.norm()))
        local(*x)
        hook.remove()
        for one in (local, copy.deepcopy(local)):
            mean: Any = one.norm.running_mean
            assert isinstance(mean, DTensor) and mean.shape == (INNER,)
            for found in (mean.norm(), seen[0]):
                torch.testing.assert_close(found, norm, rtol=0, atol=1e-9)
            one.norm.running_mean *= 2
            one.norm.running_var = one.norm.running_var * 3
            torch.testing.assert_close(one(*x), expected, rtol=0, atol=1e-9)
            one.norm.reset_running_stats()
            torch.testing.assert_close(one(*x), reset, rtol=0, atol=1e-9)

    run_ranks(2, rank)


def test_named_buffers_shows_them_whole() -> None:
    """Of what is around the model, too; averages are made of them, and calls are given them."""
    model, plan = made()
    other = copy.deepcopy(model)
    for buffer in other.buffers():
        buffer.add_(1)
    x = inputs(2, 5)
    want = AveragedModel(copy.deepcopy(model), avg_fn=lambda a, b, _: (a + b) / 2, use_buffers=True)
    for one in (model, other):
        want.update_parameters(one)

    def rank(mesh: Mesh) -> None:
        local, far = (apply(copy.deepcopy(m), plan, mesh) for m in (model, other))
        for around, prefix in ((local, ""), (nn.Sequential(local), "0.")):
            for name, buffer in model.named_buffers():
                found: Any = dict(around.named_buffers())[prefix + name]
                assert found.shape == buffer.shape
                torch.testing.assert_close(full_tensors(local, {name: found})[name], buffer)
        averaged = AveragedModel(local, avg_fn=lambda a, b, _: (a + b) / 2, use_buffers=True)
        for one in (local, far):
            averaged.update_parameters(one)
        torch.testing.assert_close(averaged(*x), want(*x), rtol=0, atol=1e-9)
        tensors = {**dict(local.named_parameters()), **dict(far.named_buffers())}
        torch.testing.assert_close(functional_call(local, tensors, x), other(*x))
        for ours, theirs in zip(local.buffers(), far.buffers(), strict=True):
            ours.copy_(theirs)
        torch.testing.assert_close(local(*x), other(*x))

    run_ranks(2, rank)


def test_state_dicts_show_and_take_them_whole() -> None:
    """As parameters: as DTensors of the whole shape; whole ones that are loaded are cut."""
    model, plan = made()
    firsts: dict[str, Tensor] = {}
    other = copy.deepcopy(model)
    for buffer in other.buffers():
        buffer.add_(1)
    x = inputs(2, 5)

    def rank(mesh: Mesh) -> tuple[dict[str, Tensor], list[Tensor]]:
        local = apply(copy.deepcopy(model), plan, mesh)
        state = local.state_dict()
        assert isinstance(state["norm.running_mean"], DTensor)
        if mesh["tp"].rank == 0:
            firsts["norm.running_mean"] = state["norm.running_mean"].clone()
        shown = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
        kept = {name: t.clone() for name, t in state.items()}
        local.load_state_dict(other.state_dict())
        outputs = [local(*x)]
        if mesh["tp"].rank == 1:  # the first has come here, too: tensors were shown whole
            with pytest.raises(UsageError, match="another rank had"):
                local.load_state_dict(firsts, strict=False)
        local.load_state_dict(kept)
        outputs.append(local(*x))
        state["norm.running_mean"].to_local().add_(1)  # it is the module's own memory
        return shown, [
            *outputs,
            full_tensors(local, dict(local.named_buffers()))["norm.running_mean"],
        ]

    for shown, (loaded, again, mean) in run_ranks(2, rank):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(shown[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(loaded, other(*x))
        torch.testing.assert_close(again, model(*x))
        torch.testing.assert_close(mean, model.get_buffer("norm.running_mean") + 1)
