"""Gradients of fused weights in training loops of one's own, and recurrent layers copied."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import shardwright
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.ranks import run_ranks


class Recurrent(nn.Module):
    """The weights of its gates are fused: each rank has some of each gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.GRU(12, 16, batch_first=True), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gates(x)[0])


X = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1)).double()
torch.manual_seed(0)
BASE = Recurrent().double()


planned = planning.Once(lambda: planning.plan(copy.deepcopy(BASE), 2, args=(X,)))


def whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def orthogonal(model: nn.Module) -> Any:
    """A step of Newton and Schulz, of whichever is wide of a matrix and its transpose; in place."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2 and p.grad is not None:
                x = p.grad.clone().T if p.shape[0] > p.shape[1] else p.grad.clone()
                x.div_(x.norm())
                x = 1.5 * x - 0.5 * (x @ x.T) @ x
                p.add_(x.T if p.shape[0] > p.shape[1] else x)
    return [p.T @ p for p in model.parameters() if p.dim() == 2]


def joined(model: nn.Module) -> Any:
    """All gradients as one vector, as measures of their likeness take them."""
    grads: Any = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    return flat, flat.norm()


def turned(model: nn.Module) -> Any:
    """Transposes are views, which may be written to."""
    with torch.no_grad():
        for p in model.parameters():
            p.transpose(0, -1).mul_(p.permute(*range(p.dim())).norm())
    return [p.mT.sum(0) for p in model.parameters() if p.dim() == 2]


def averaged(model: nn.Module) -> Any:
    """A copy that follows the model, in float32 for a while."""
    follower = copy.deepcopy(model)
    with torch.no_grad():
        for own, other in zip(follower.parameters(), model.parameters(), strict=True):
            own.lerp_(other * 2, 0.5)
    before = copy.deepcopy(follower).float()(X.float())
    assert before.dtype == torch.float32
    return follower(X)


@pytest.mark.parametrize("use", [orthogonal, joined, turned, averaged], ids=lambda f: f.__name__)
def test_is_what_it_is_of_the_unsplit_model(use: Callable[[nn.Module], Any]) -> None:
    def ran(model: nn.Module) -> Any:
        # Of its mean a gradient is Partial, and one that is kept is copied by torch: neither lies
        # as the parameter does.
        kept = []
        for p in model.parameters():
            p.register_hook(lambda g: g - g.mean())
            p.register_hook(kept.append)
        (model(X) ** 2).sum().backward()
        grads = full_tensors(model, {n: p.grad for n, p in model.named_parameters()})
        made = use(model)
        values = full_tensors(model, {n: p.detach() for n, p in model.named_parameters()})
        return grads, tree_map(whole, made), values, model(X)

    want = ran(copy.deepcopy(BASE))

    def work(mesh: Mesh) -> None:
        found = ran(shardwright.apply(copy.deepcopy(BASE), planned(), mesh))
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)

    run_ranks(2, work)
