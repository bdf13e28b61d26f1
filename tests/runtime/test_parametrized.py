"""Mixtures whose routers and experts are parametrized while they run, as adapters do it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import shardwright
from shardwright.errors import ModelError
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks

WIDTH, INNER, EXPERTS, RANK = 6, 12, 4, 2
X = torch.randn(3, 19, WIDTH, dtype=torch.float64)


class Plus(nn.Module):
    def __init__(self, more: Tensor) -> None:
        super().__init__()
        self.more = more

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.more


class Adapted(nn.Module):
    """Adds a product of two small matrices to a parameter of what it is around."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name
        self.experts, out, width = (1, 1, *self.parameter().shape)[-3:]
        self.a = nn.Linear(width, RANK * self.experts, bias=False)
        self.b = nn.Linear(RANK * self.experts, out, bias=False)
        self.parameter().requires_grad_(False)

    def base(self) -> Any:
        return self.inner.base() if isinstance(self.inner, Adapted) else self.inner

    def parameter(self) -> Any:
        return getattr(self.base(), self.name)

    def forward(self, *args: Tensor) -> Tensor:
        base = self.base()
        trains = self.parameter().requires_grad
        a = self.a.weight.reshape(self.experts, -1, self.a.weight.shape[-1])
        b = self.b.weight.reshape(self.b.weight.shape[0], -1, self.experts)
        more = torch.einsum("ore,eri->eoi", b, a)
        more = more if self.parameter().dim() == 3 else more[0]
        parametrize.register_parametrization(base, self.name, Plus(more))
        base.parametrizations[self.name].original.requires_grad_(trains)
        try:
            with parametrize.cached():
                return self.inner(*args)
        finally:
            parametrize.remove_parametrizations(base, self.name, leave_parametrized=False)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight).softmax(-1).topk(2, -1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for row in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            expert = row[0]
            at, token = torch.where(mask[expert])
            gate, up = F.linear(x[token], self.up[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, token, made * weights[token, at, None])
        return out


class Opaque(Experts):
    """What it does depends on data: it runs whole."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if float(x.detach().sum()) * 2 > 1e9:
            return x
        return super().forward(x, weights, chosen)


class Mixture(nn.Module):
    def __init__(self, experts: type[Experts]) -> None:
        super().__init__()
        self.router: nn.Module = Adapted(Router(), "weight")
        self.experts = Adapted(Adapted(experts(), "up"), "down")

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return x + self.experts(flat, *self.router(flat)).view_as(x)


def mixtures(experts: type[Experts] = Experts) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Mixture(experts), Mixture(experts)).double()


@pytest.mark.parametrize(("tp", "experts"), [(2, Experts), (3, Experts), (2, Opaque)])
def test_adapters_on_routers_and_experts_train_as_those_of_the_whole(
    tp: int, experts: type[Experts]
) -> None:
    base = mixtures(experts)
    plan = planning.plan(base, tp=tp, args=(X,))
    named = base.named_parameters()
    inner = "1.experts.inner.inner"
    own = plan.module(inner)
    assert own is None or not own.parameters, "weights cached over passes of a loop stay whole"
    expected, wanted = _step(copy.deepcopy(base))

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        kinds = [type(m) for m in split.modules()]
        for _ in range(2):  # nothing is left of the first
            split.zero_grad()
            found, grads = _step(split)
            torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
            whole = shardwright.full_tensors(split, grads)
            assert whole.keys() == wanted.keys() == {n for n, p in named if p.requires_grad}
            for name, grad in wanted.items():
                torch.testing.assert_close(whole[name], grad, atol=1e-9, rtol=1e-9)
        assert kinds == [type(m) for m in split.modules()]
        kept = shardwright.full_tensors(split, split.state_dict())
        assert kept.keys() == base.state_dict().keys()
        assert all(torch.equal(kept[name], v) for name, v in base.state_dict().items())

    named = list(named)
    run_ranks(tp, work)


def _step(model: nn.Module) -> tuple[Tensor, dict[str, Any]]:
    out = model(X)
    (out * torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_what_writes_to_a_parameter_is_refused() -> None:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            parametrize.register_parametrization(self.inner, "weight", Halved())
            parametrize.remove_parametrizations(self.inner, "weight")
            return self.inner(x)

    with pytest.raises(ModelError, match="leave_parametrized=False"):
        planning.plan(nn.Sequential(Merged()), tp=2, args=(X.float(),))
    Halved.right_inverse = lambda self, value: value * 2  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match="which writes to it"):
        planning.plan(nn.Sequential(Merged()), tp=2, args=(X.float(),))


def test_modules_that_nobody_splits_are_parametrized_by_torch() -> None:
    planning.plan(nn.Linear(WIDTH, WIDTH), tp=2, args=(X.float(),))
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    assert parametrize.is_parametrized(layer) and "parametrizations.weight.original1" in dict(
        layer.named_parameters()
    )
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Linear and isinstance(layer.weight, nn.Parameter)
