"""Hooks on a module that is called several times, with parts in some calls and wholes in others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks
from tests.runtime.test_hooks import put_gradient_hooks, reads_of_hooks, same


class Shared(nn.Module):
    """One activation for what is split, and for what is whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.down(self.act(self.up(x))))


class Looped(Shared):
    """The same from one place."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.up, self.down):
            x = self.act(layer(x))
        return x


class Rerun(Shared):
    """The same, run again for its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[return-value]


@pytest.mark.parametrize("tp", [2, 3])
def test_hooks_on_what_is_called_otherwise_each_time_see_whole_tensors(tp: int) -> None:
    """By place in code, and by sizes, it is known whether tensors are parts; else nobody can tell.

    Then all ranks refuse, though some of them might know.
    """
    torch.manual_seed(0)
    x, width = torch.randn(3, 8).double(), -(-24 // tp)
    models = [Looped(7), Shared(width), Rerun(width), Looped(width)]
    plans = [planning.plan(m.double(), tp=tp, args=(x,)) for m in models]
    assert all(p.modules["act"].varies for p in plans)
    wholes = copy.deepcopy(models[:-1])
    read = [put_gradient_hooks(whole) for whole in wholes]
    want = [reads_of_hooks(whole, x.clone().requires_grad_(), ["act"]) for whole in wholes]

    def work(mesh: Mesh) -> None:
        every = [apply(copy.deepcopy(m), p, mesh) for m, p in zip(models, plans, strict=True)]
        for local, reads, wanted in zip(every, read, want, strict=False):
            seen = put_gradient_hooks(local)
            got = reads_of_hooks(local, x.clone().requires_grad_(), ["act"])
            same([t.full_tensor() if isinstance(t, DTensor) else t for t in got], wanted)
            same(seen, reads)
        local: Any = every[-1]
        same(local(x), models[-1](x))
        local.act.register_forward_hook(lambda *_: None)
        with pytest.raises(UsageError, match="'act' has a hook.*several times"):
            local(x)

    run_ranks(tp, work)
