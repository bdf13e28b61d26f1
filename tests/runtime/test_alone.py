"""What nothing is known of is refused, where modules are called alone, and at the root."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import ModulePlan, Placed
from shardwright.runtime.api import apply
from shardwright.runtime.boundary.interface import AROUND, ModuleInterface
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks

WIDTH, HEADS = 8, 4


class Heads(nn.Module):
    """Takes heads apart; a copy of it is made of their number alone."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1)

    def __getstate__(self) -> Any:
        return {"heads": self.heads}

    def __setstate__(self, state: Any) -> None:
        self.__init__(state["heads"])


class Gated(nn.Module):
    """Heads behind a gate that the model makes of numbers, and something that it has no use for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.heads, self.split = HEADS, Heads(HEADS)

    def forward(self, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        h = self.split(self.up(x)) * gate[..., None, None]
        return self.down(h.view(*x.shape[:-1], self.heads * 6).tanh()), x.mean(-1)


class Net(nn.Module):
    """Changes in place what a module gave, and computes otherwise where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()

    def forward(self, x: Tensor, cubed: bool = False) -> Tensor:
        gate = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        out = self.inner(x, gate)[0]
        out += x
        return out**3 / out.pow(2).sum(-1, keepdim=True) if cubed else out


@pytest.fixture(scope="module")
def split() -> tuple[Net, Tensor, Callable[[Callable[[Any], None]], None]]:
    """A whole model, its input, and what runs a check of its split copy on each rank."""
    torch.manual_seed(0)
    model, x = Net().double().eval(), torch.randn(2, 5, WIDTH).double()
    plan = planning.plan(model, tp=2, args=(x,))
    assert plan.modules["inner"].no_gradient == ["in gate"]
    assert plan.modules["inner"].attributes

    def run(check: Callable[[Any], None]) -> None:
        def work(mesh: Mesh) -> None:
            check(apply(copy.deepcopy(model), plan, mesh))

        run_ranks(2, work)

    return model, x, run


def test_a_gradient_that_no_call_had_is_refused_alone(split: Any) -> None:
    """The gate's would be a term of a sum on each rank; the mean's is whole, as the input's."""
    model, x, run = split
    gate = torch.linspace(0, 1, 5).double()
    want = model.inner(x, gate)
    of_mean = gradients_of_mean(model.inner, x, gate)

    def check(local: Any) -> None:
        for out, of_whole in zip(local.inner(x, gate), want, strict=True):
            torch.testing.assert_close(out, of_whole, rtol=0, atol=1e-9)
        learned = gate.clone().requires_grad_()
        with pytest.raises(UsageError, match="a backward pass reached input 'gate' of 'inner'"):
            local.inner(x, learned)[0].sum().backward()
        torch.testing.assert_close(
            gradients_of_mean(local.inner, x, gate), of_mean, rtol=0, atol=1e-9
        )

    run(check)


def gradients_of_mean(inner: Any, x: Tensor, gate: Tensor) -> Tensor:
    """The gradient of `x` by all that `inner` gives."""
    given = x.clone().requires_grad_()
    out, mean = inner(given, gate)
    (out.pow(2).sum() + mean.pow(3).sum()).backward()
    assert given.grad is not None
    return given.grad


def test_a_gradient_that_no_call_had_is_refused_to_hooks(split: Any) -> None:
    """That of the mean, which nothing in the model takes, is right there, too."""
    model, x, run = split
    want = gradient_by_hook(copy.deepcopy(model), x)

    def check(local: Any) -> None:
        learned = torch.ones(5).double().requires_grad_()
        hook = local.inner.register_forward_pre_hook(lambda _, args: (args[0], learned))
        with pytest.raises(UsageError, match="a backward pass reached input 'gate' of 'inner'"):
            local(x).sum().backward()
        hook.remove()
        torch.testing.assert_close(gradient_by_hook(local, x), want, rtol=0, atol=1e-9)

    run(check)


def gradient_by_hook(model: Any, x: Tensor) -> Tensor:
    """The gradient of `x` by what the model gives, and the mean in it."""
    given, seen = x.clone().requires_grad_(), list[Tensor]()
    model.inner.register_forward_hook(lambda _, __, out: seen.append(out[1]))
    (model(given).sum() + seen[0].pow(3).sum()).backward()
    assert given.grad is not None
    return given.grad


def test_what_a_hook_gives_may_be_changed_in_place() -> None:
    """Autograd lets nobody write into a view that a function of ours made."""
    spec = ModulePlan(gives=[Placed(slot="", placement="?, 8 | grad-partial tp")])

    def work(mesh: Mesh) -> None:
        x = torch.ones(3, 8, requires_grad=True)
        out = ModuleInterface(nn.Identity.forward, True, spec, mesh, "m").output_as(
            x * 2, AROUND, full=False
        )
        out += 1
        out.sum().backward()
        assert torch.equal(out, torch.full((3, 8), 3.0))
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((3, 8), 4.0))  # a term of each of two ranks

    run_ranks(2, work)


def test_copies_of_modules_that_say_what_a_copy_is_made_of(split: Any) -> None:
    model, x, run = split
    want = model(x)

    def check(local: Any) -> None:
        for again in (copy.deepcopy(local), copy.copy(local)):
            torch.testing.assert_close(again(x), want, rtol=0, atol=1e-9)
        wide, one = x.repeat(1, 1, 3), copy.copy(local.inner.split)
        torch.testing.assert_close(one(wide), wide.view(2, 5, HEADS, -1), rtol=0, atol=0)

    run(check)


def test_what_asks_for_code_that_no_call_ran_is_refused(split: Any) -> None:
    _, x, run = split

    def check(local: Any) -> None:
        local(x, cubed=False)
        with pytest.raises(UsageError, match="'cubed' of Net was given in no call"):
            local(x, cubed=True)
        with pytest.raises(UsageError, match="'cubed' of Net was given in no call"):
            local(x, True)

    run(check)


class Lent(nn.Module):
    """A head whose weight other code takes; nobody calls the head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, 24), nn.Linear(24, 13)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.up(x).tanh(), self.head.weight)


def test_a_layer_that_no_call_ran_is_refused() -> None:
    torch.manual_seed(0)
    model, x = Lent().double(), torch.randn(2, 5, WIDTH).double()
    plan = planning.plan(model, tp=3, args=(x,))
    assert "@" in plan.modules["head"].parameters["weight"].placement

    def work(mesh: Mesh) -> None:
        split: Any = apply(copy.deepcopy(model), plan, mesh)
        with pytest.raises(UsageError, match="of 'head': it is in no call that the plan was made"):
            split.head(torch.randn(7, 24).double())
        torch.testing.assert_close(split(x), model(x), rtol=0, atol=1e-12)

    run_ranks(3, work)


class Tied(nn.Module):
    """Looks ids up in one table only, and multiplies with it; two other modules hold it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.table = nn.Embedding(60, 16), nn.Embedding(60, 16)
        self.padded, self.head = nn.Embedding(60, 16, padding_idx=0), nn.Linear(16, 60, bias=False)
        for module in (self.table, self.padded, self.head):
            module.weight = self.shared.weight
        self.up, self.down = nn.Linear(16, 96), nn.Linear(96, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return (x + self.down(self.up(x).tanh())) @ self.table.weight.T


def test_a_module_that_no_call_ran_computes_as_its_twin() -> None:
    """Only one of the same class with the same settings does: other code may need other shards."""
    torch.manual_seed(0)
    model, ids = Tied().double(), torch.randint(60, (2, 7))
    plan = planning.plan(model, tp=2, args=(ids,))
    assert "@" in plan.modules["shared"].parameters["weight"].placement
    assert plan.modules["shared"] == plan.modules["table"]

    def work(mesh: Mesh) -> None:
        split: Any = apply(copy.deepcopy(model), plan, mesh)
        torch.testing.assert_close(split.shared(ids), model.shared(ids), rtol=0, atol=1e-12)
        torch.testing.assert_close(split(ids), model(ids), rtol=0, atol=1e-12)
        with pytest.raises(UsageError, match="of 'head': it is in no call that the plan was made"):
            split.head(torch.randn(7, 16).double())
        with pytest.raises(UsageError, match="of 'padded': it is in no call that the plan was"):
            split.padded(ids)

    run_ranks(2, work)


class Gains(nn.Module):
    """Its code reads the weights of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.gain = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down((self.up(x) * self.gain.weight + self.gain.bias).tanh())


class AroundGains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.blocks = nn.LayerNorm(WIDTH), nn.ModuleList([Gains(), Gains()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x


def test_a_module_that_reads_the_weights_of_another_reads_whole_ones_alone() -> None:
    """What modules within give is whole then, and so must be what it is multiplied with."""
    torch.manual_seed(0)
    model, x = AroundGains().double(), torch.randn(3, WIDTH).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    plan = planning.plan(model, tp=2, args=(x,))
    assert "@" in plan.modules["blocks.*.gain"].parameters["weight"].placement

    def numbers(model: Any) -> list[Tensor]:
        out = model.blocks[0](x)
        out.pow(2).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return [out, *shardwright.full_tensors(model, grads).values()]

    want = numbers(copy.deepcopy(model))
    assert len(want) == 7

    def rank(mesh: Mesh) -> None:
        found = numbers(apply(copy.deepcopy(model), plan, mesh))
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)

    run_ranks(2, rank)


def test_slices_of_containers_compute_with_full_tensors() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    x = torch.randn(5, 8)
    plan = planning.plan(copy.deepcopy(base), tp=2, args=(x,))

    def work(mesh: Mesh) -> tuple[type, Tensor, Tensor]:
        split: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        return type(split[:2]), split[:2](x), split[1:](split[0](x))

    for kind, first, all_but_first in run_ranks(2, work):
        assert kind is nn.Sequential
        torch.testing.assert_close(first, base[:2](x))
        torch.testing.assert_close(all_but_first, base(x))
