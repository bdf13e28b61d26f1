"""Forward hooks on split modules see whole tensors, and give them, in value and gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.api import apply
from shardwright.runtime.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks


class Mlp(nn.Module):
    """One split by rows, one by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def loss_with_hooks(model: Any, x: Tensor, hooked: Any) -> Tensor:
    """What hooks read is in the loss, and one gives something else."""
    seen = hooked(model)
    out = model(x)
    return out.pow(2).sum() + sum(t.pow(3).sum() for t in seen)


def put_hooks(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []

    def behind(_: Any, args: Any, out: Tensor) -> Tensor:
        seen.extend((args[0], out))
        return out * torch.arange(1.0, 25.0, dtype=out.dtype)

    def before(_: Any, args: Any) -> Any:
        return (args[0] - args[0].mean(-1, keepdim=True),)

    def named(_: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        seen.append(out)

    model.up.register_forward_hook(behind)
    model.down.register_forward_pre_hook(before)
    model.down.register_forward_hook(named, with_kwargs=True)
    return seen


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("tp", [2, 3])
def test_hooks_see_and_give_whole_tensors(tp: int, early: bool) -> None:
    """Also those that were there before the model was split."""
    torch.manual_seed(0)
    model, x = Mlp().double(), torch.randn(3, 5, 8).double()
    plan = planning.plan(model, tp=tp, args=(x,))
    assert plan.predicted.collectives
    whole = copy.deepcopy(model)
    want = loss_with_hooks(whole, x, put_hooks)
    want.backward()

    def work(mesh: Mesh) -> None:
        local: Any = copy.deepcopy(model)
        seen = put_hooks(local) if early else None
        local = apply(local, plan, mesh)
        got = loss_with_hooks(local, x, lambda m: put_hooks(m) if seen is None else seen)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
        got.backward()
        for name, p in local.named_parameters():
            expected = whole.get_parameter(name).grad
            torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=0, atol=1e-9)

    run_ranks(tp, work)
