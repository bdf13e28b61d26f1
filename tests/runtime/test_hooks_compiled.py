"""Hooks on modules of a compiled split model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported

from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks
from tests.runtime.test_hooks import Mlp, put_gradient_hooks, put_hooks


@pytest.mark.parametrize("put", [put_hooks, put_gradient_hooks])
def test_hooks_run_between_compiled_graphs(put):
    """They are checked while they run, so `fullgraph=True` says that it cannot be."""
    model, x = Mlp().double(), torch.randn(3, 5, 8).double().requires_grad_()
    plan = planning.plan(model, 2, args=(x.detach(),))

    def gradient(of: Any, under: Any) -> Tensor:
        seen = put(under)
        loss = of(x).pow(2).sum()
        first = loss + sum(t.pow(3).sum() for t in seen if t.requires_grad)
        return torch.autograd.grad(first, x)[0]

    want = copy.deepcopy(model)
    wanted = gradient(want, want)

    def work(mesh: Mesh) -> None:
        mine = apply(copy.deepcopy(model), plan, mesh)
        found = gradient(torch.compile(mine, backend="eager"), mine)
        torch.testing.assert_close(found, wanted)

    def refused(mesh: Mesh) -> None:
        mine = apply(copy.deepcopy(model), plan, mesh)
        put(mine)
        with pytest.raises(Unsupported, match="compile without fullgraph"):
            torch.compile(mine, backend="eager", fullgraph=True)(x)

    for run in (work, refused):
        torch._dynamo.reset()
        run_ranks(2, run)
