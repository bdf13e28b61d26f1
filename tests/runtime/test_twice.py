"""Gradients of gradients through a split model: penalties, as discriminators have them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution import reshard
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.ranks import run_ranks


class Model(nn.Module):
    """Attention, a fused gate, and a loop that uses its weights several times."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o, self.norm = nn.Linear(12, 36), nn.Linear(12, 12), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 48), nn.Linear(24, 12, bias=False)
        self.again = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 6, 2)).permute(2, 0, 3, 1, 4)
        x = x + self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        gate, up = self.up(x).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        for _ in range(2):
            x = torch.tanh(self.again(x))
        return x


torch.manual_seed(0)
BASE = Model().double()
X = torch.randn(2, 5, 12).double()


def penalized(model: nn.Module, at: str) -> list[Tensor]:
    """Gradients of the first three orders of what comes in, or of what a module gives."""
    x, seen = X.clone().requires_grad_(), []
    if at:
        hook = lambda *args: seen.append(args[-1])  # noqa: E731
        model.get_submodule(at).register_forward_hook(hook)
    out = model(x)
    point: Any = seen[0] if at else x
    one = torch.autograd.grad(out.pow(3).sum(), point, create_graph=True)[0]
    two = torch.autograd.grad(one.pow(3).sum(), point, create_graph=True)[0]
    (two.pow(2).sum() + one.pow(2).sum() + out.sum()).backward()
    assert x.grad is not None
    return [out.detach(), one.detach(), two.detach(), x.grad]


@pytest.mark.parametrize("at", ["", "qkv"])
@pytest.mark.parametrize(("tp", "beside"), [(2, True), (3, False)])
def test_gradients_of_gradients(
    tp: int, beside: bool, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no sum is waited for beside other work, as on CPU ranks of one host."""
    if not beside:
        monkeypatch.setattr(reshard, "overlaps", lambda *_: False)
    plan = planning.plan(copy.deepcopy(BASE), tp, args=(torch.zeros(3, 7, 12).double(),))
    assert max(plan.predicted.parameter_bytes) < 0.6 * plan.predicted.unsharded_bytes
    wanted = penalized(whole := copy.deepcopy(BASE), at)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(BASE), plan, mesh)
        found = penalized(split, at)
        grads = full_tensors(split, {n: p.grad for n, p in split.named_parameters()})
        pairs: list[Any] = [*zip(found, wanted, strict=True)]
        pairs += [(grads[n], p.grad) for n, p in whole.named_parameters()]
        for a, b in pairs:
            assert (a - b).abs().max() <= 1e-9 * max(1.0, float(b.abs().max()))

    run_ranks(tp, work)
