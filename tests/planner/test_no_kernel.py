"""Ops that do not run without data, in a submodule: it stays replicated, the rest is split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.runtime.api import apply
from tests import planning
from tests.ranks import run_ranks

X = torch.randn(3, 19, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@torch.library.custom_op("shardwright_tests::reversed_rows", mutates_args=())
def reversed_rows(x: Tensor) -> Tensor:
    return x.flip(-1) * 3


reversed_rows.register_autograd(lambda _, grad: grad.flip(-1) * 3)


class OwnOp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return reversed_rows(x)


class ReadsMemory(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1) * (3 if x.data_ptr() else 4)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[0].to_sparse().to_dense() + x.flip(-1)


class Writes(nn.Module):
    """A log line."""

    def forward(self, x: Tensor) -> Tensor:
        assert f"{x.mean():.3f}"
        return x.flip(-1) * 3


class Around(nn.Module):
    def __init__(self, within: nn.Module) -> None:
        super().__init__()
        self.up, self.within, self.down = nn.Linear(24, 48), within, nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.within(self.up(x)).tanh())


class OfItsOwn(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(reversed_rows(self.up(x)))


def gradients(model: Any) -> list[Tensor]:
    x = X.clone().requires_grad_()
    out = model(x)
    (out * X).sum().backward()
    full = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
    return [out, x.grad, *full]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [OwnOp, ReadsMemory, Sparse, Writes])
def test_the_module_around_it_stays_replicated(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Around(kind()).double()
    plan = planning.plan(copy.deepcopy(model), tp=2, args=(X,))
    assert [*plan.opaque] == [f"module {kind.__name__}"]
    assert "@" in plan.modules["up"].parameters["weight"].placement
    want = gradients(copy.deepcopy(model))
    for found in run_ranks(2, lambda mesh: gradients(apply(copy.deepcopy(model), plan, mesh))):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)


def test_of_the_root_it_is_refused_with_what_helps() -> None:
    with pytest.raises(ModelError, match=r"test_no_kernel.py:.* into a submodule.*register_fake"):
        planning.plan(OfItsOwn(nn.Identity()).double(), tp=2, args=(X,))
