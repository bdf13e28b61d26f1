"""Batch norms split by channel: their running statistics are split as well, and trained."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.gather import full_tensors
from shardwright.runtime.mesh import Mesh
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
