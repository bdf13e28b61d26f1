"""Gradients that hooks ask for, of what nothing in the model takes, and of what has none there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.ranks import run_ranks


class Part(nn.Module):
    """A split pair of layers, beside what nobody takes: of the input, of parts, of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x).tanh()
        return self.down(h), x.softmax(-1).mean(0), h.exp(), x * whole, whole.sin()


class Outer(nn.Module):
    """Hands on what nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, whole: Tensor) -> tuple[Tensor, ...]:
        return self.part(x, whole)


class Model(nn.Module):
    """One norm for what is split, one for what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.outer = nn.LayerNorm(8), nn.LayerNorm(8), Outer()

    def forward(self, x: Tensor) -> Tensor:
        whole = self.two(x)
        return self.outer(self.one(x), whole)[0] + whole


def gradients(model: Any, x: Tensor, name: str, slots: tuple[int, ...]) -> dict[str, Tensor]:
    """All gradients by what the model gives, and what a module in it gives in `slots`."""
    seen: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_hook(
        lambda _, __, out: seen.extend(out[i] for i in slots)
    )
    given = x.clone().requires_grad_()
    (model(given).pow(2).sum() + sum(t.pow(3).sum() for t in seen)).backward()
    hook.remove()
    assert given.grad is not None
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return full_tensors(model, found) | {"input": given.grad}


@pytest.mark.parametrize("tp", [2, 3])
def test_of_what_nobody_takes(tp: int) -> None:
    """As what it is made of has it, a term of a sum or whole; where that differs it is refused."""
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(3, 5, 8).double()
    plan = planning.plan(model, tp=tp, args=(x,))
    for name in ("outer", "outer.part"):
        gives = {p.slot: p.placement for p in plan.modules[name].gives}
        assert gives["1"].endswith(" | grad-partial tp")
        assert "@tp" in gives["2"]
        assert "tp" not in gives["4"]
        assert plan.modules[name].no_gradient == ["out 3"]
    want = [gradients(copy.deepcopy(model), x, n, (1, 2, 4)) for n in ("outer", "outer.part")]

    def work(mesh: Mesh) -> None:
        for name, expected in zip(("outer", "outer.part"), want, strict=True):
            found = gradients(apply(copy.deepcopy(model), plan, mesh), x, name, (1, 2, 4))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        local = apply(copy.deepcopy(model), plan, mesh)
        with pytest.raises(UsageError, match="a backward pass reached output '3' of 'outer.part'"):
            gradients(local, x, "outer.part", (3,))

    run_ranks(tp, work)


class Delayed(nn.Module):
    """One layer for what has a gradient, and for zeros."""

    def __init__(self, zeros_first: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)
        self.zeros_first = zeros_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        given = [torch.zeros_like(x), x] if self.zeros_first else [x, torch.zeros_like(x)]
        one, other = map(self.up, given)
        return self.down((one + other).tanh())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("zeros_first", [False, True])
def test_a_layer_that_is_also_given_zeros(zeros_first: bool) -> None:
    """Its hooks see whole tensors and gradients in each call: what has none lies as what has."""
    torch.manual_seed(0)
    model, x = Delayed(zeros_first).double(), torch.randn(3, 5, 8).double()
    plan = planning.plan(model, tp=2, args=(x,))
    assert "grad-partial" in plan.modules["up"].takes[0].placement
    assert not plan.modules["up"].varies
    want = hooked(copy.deepcopy(model), x)

    def work(mesh: Mesh) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        torch.testing.assert_close(hooked(local, x), want, rtol=1e-9, atol=1e-9)

    run_ranks(2, work)


def hooked(model: Any, x: Tensor) -> list[Tensor]:
    """What hooks read of the layer, and all gradients by that and by what the model gives."""
    read: list[Tensor] = []
    of_gradients: list[Tensor] = []
    model.up.register_forward_hook(lambda _, given, out: read.extend((*given, out)))
    model.up.register_full_backward_hook(
        lambda _, given, out: of_gradients.extend(t for t in (*given, *out) if t is not None)
    )
    given = x.clone().requires_grad_()
    (model(given).pow(2).sum() + sum(t.pow(3).sum() for t in read if t.requires_grad)).backward()
    assert given.grad is not None
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [*read, *of_gradients, given.grad, *full_tensors(model, found).values()]
