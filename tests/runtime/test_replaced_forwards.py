"""Forwards that are put on modules after splitting: on the root they run, else are refused."""
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import shardwright
from shardwright.errors import UsageError
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks
from tests.runtime.test_dtensors import IDS, gpt2, made, planned


def test_a_forward_that_is_put_on_a_module_within_is_refused() -> None:
    base, plan = made(gpt2), planned(gpt2)
    want = base(IDS).logits

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        for module in (split.transformer.h[0].attn, split.transformer.h[0], split.transformer.ln_f):
            own = module.forward
            for forward in (
                lambda *args, **kwargs: None,
                functools.partial(own),
                MethodType(lambda self, *args: args, module),
            ):
                with pytest.raises(UsageError, match="a forward is put on 'transformer"):
                    module.forward = forward
            module.forward = own
            assert "forward" not in vars(module)
        torch.testing.assert_close(split(IDS).logits, want, rtol=0, atol=1e-9)

    run_ranks(2, work)


def test_a_forward_on_the_root_calls_what_was_there() -> None:
    """As accelerate's `prepare` has it."""
    base, plan = made(gpt2), planned(gpt2)
    want = base(IDS).logits

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        own = split.forward
        split.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
        for _ in range(2):
            torch.testing.assert_close(split(IDS).logits, want, rtol=0, atol=1e-9)
        del split.forward
        torch.testing.assert_close(split(IDS).logits, want, rtol=0, atol=1e-9)

    run_ranks(2, work)


class Mlp(nn.Module):
    """Its own forward is never run: one is put on each instance."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("replaced")


def faster(module: Any, x: torch.Tensor, times: int = 1) -> torch.Tensor:
    for _ in range(times):
        x = x + module.down(torch.relu(module.up(x)))
    return x


class Net(nn.Module):
    def __init__(self, bind: Any) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(Mlp() for _ in range(2))
        for mlp in self.mlps:
            mlp.forward = bind(faster, mlp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mlp in self.mlps:
            x = mlp(x, times=2)
        return x


@pytest.mark.parametrize("bind", [MethodType, functools.partial])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("root", [False, True])
def test_forwards_that_were_put_on_before_planning_are_split(
    bind: Any, ranks: int, root: bool
) -> None:
    net = Net(bind).double()
    whole: Any = net.mlps[0] if root else net
    x = torch.randn(3, 19, 16, dtype=torch.float64)
    plan = planning.plan(whole, tp=ranks, args=(torch.zeros_like(x),))
    assert max(plan.predicted.parameter_bytes) < 0.6 * plan.predicted.unsharded_bytes
    want = whole(x)
    want.square().sum().backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(whole), plan, mesh)
        found = split(x)
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)
        found.square().sum().backward()
        for name, p in split.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), gradients[name], rtol=0, atol=1e-9)

    run_ranks(ranks, work)
