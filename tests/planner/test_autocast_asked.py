"""Code that asks for autocast: proven where it only casts, refused under it where it does more."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests.planner.equal import features, planned, randomize
from tests.planner.test_gradients_asked import INNER, WIDTH, Mlp
from tests.ranks import run_ranks


class Casts(Mlp):
    """As code around fused kernels does."""

    def inner(self, h: Tensor) -> Tensor:
        if torch.is_autocast_enabled(h.device.type):
            h = h.to(torch.get_autocast_dtype(h.device.type))
        return h.relu()


class Sums(Mlp):
    def inner(self, h: Tensor) -> Tensor:
        return h / (1 + h.sum(-1, True)) if torch.is_autocast_enabled(h.device.type) else h.relu()


class Raises(Mlp):
    """With what casts everything only where it is on."""

    def inner(self, h: Tensor) -> Tensor:
        if torch.is_autocast_enabled(h.device.type):
            h = nn.functional.linear(h.half(), torch.ones(INNER, INNER, device=h.device))
        return h.relu()


@pytest.mark.parametrize(("kind", "refused"), [(Mlp, 0), (Casts, 0), (Sums, 1), (Raises, 1)])
def test_what_computes_otherwise_under_autocast(kind: type[Mlp], refused: bool) -> None:
    model = kind()
    randomize(model)
    plan = planned(model, lambda *sizes: tuple(x.float() for x in features(WIDTH)(*sizes)), 2)
    assert [call.asks_autocast for call in plan.calls] == [refused]
    x = torch.randn(2, 7, WIDTH)
    want = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(x)

    def rank(mesh: Mesh) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        torch.testing.assert_close(local(x), want)
        with torch.autocast("cpu", torch.bfloat16):
            if not refused:
                torch.testing.assert_close(local(x), cast, rtol=0.1, atol=0.1)
                return
            for part in (local, local.get_submodule("up")):
                with pytest.raises(UsageError, match=f"the code of {kind.__name__} checks whether"):
                    part(x)

    run_ranks(2, rank)
