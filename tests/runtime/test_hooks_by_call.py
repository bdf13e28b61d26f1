"""Hooks on a module that is called several times, with parts in some calls and wholes in others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks


class Shared(nn.Module):
    """One activation for what is split, and for what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.down(self.act(self.up(x))))


def test_hooks_on_what_is_called_with_other_layouts_each_time_are_refused() -> None:
    torch.manual_seed(0)
    model, x = Shared().double(), torch.randn(3, 8).double()
    plan = planning.plan(model, tp=2, args=(x,))
    assert plan.modules["act"].varies
    want = model(x)

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        torch.testing.assert_close(local(x), want, rtol=1e-9, atol=1e-9)
        for put in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
            handle = getattr(local.act, f"register_{put}")(lambda *_: None)
            with pytest.raises(UsageError, match="'act' has a hook.*several times.*around it"):
                local(x)
            handle.remove()
        torch.testing.assert_close(local.act(x), x.tanh(), rtol=1e-9, atol=1e-9)

    run_ranks(2, work)
