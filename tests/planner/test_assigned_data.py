"""Code of a forward that sets `data` of parameters, which no op shows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwright.errors import ModelError, UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.planner.equal import features, planned
from tests.ranks import run_ranks

WIDTH, INNER = 24, 36


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def change(self) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return self.down(self.up(x).relu()) * self.scale


class Clipped(Pair):
    def change(self) -> None:
        for layer in (self.up, self.down):
            layer.weight.data = layer.weight.data.clamp(-0.05, 0.05)


class OfRows(Pair):
    """Rows of the second matrix are sharded."""

    def change(self) -> None:
        self.up.weight.data = F.normalize(self.up.weight.data, dim=-1)
        self.down.weight.data = F.normalize(self.down.weight, dim=-1)


class Biases(Pair):
    """A rank that adds no bias must not keep one of zeros."""

    def change(self) -> None:
        for layer in (self.up, self.down):
            layer.bias.data = layer.bias.data.clamp(-0.01, 0.01) + 0.5


def halve(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data / 2


class Elsewhere(Pair):
    """In a function, and of parameters that stay replicated."""

    def change(self) -> None:
        halve(self.up)
        self.scale.data = self.scale.data * 0.5


class ByName(Pair):
    def change(self) -> None:
        for p in self.parameters():
            p.data = p.data.clamp(-0.05, 0.05)


class Columns(Pair):
    def change(self) -> None:
        for p in self.parameters():
            if p.dim() == 2:
                p.data = F.normalize(p.data, dim=0)


class InTraining(Clipped):
    def change(self) -> None:
        if self.training:
            super().change()


class Cast(Pair):
    """`Module.to` sets `data` past attributes."""

    def change(self) -> None:
        self.up.to(torch.float32).to(torch.float64)
        self.down.weight.data = self.down.weight.data.float()

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return F.linear(self.up(x).relu(), self.down.weight.double()) * self.scale


KINDS = [Clipped, OfRows, Biases, Elsewhere, ByName, Columns, InTraining, Cast]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [2, 3])
def test_what_is_set_stays(kind: type[Pair], tp: int) -> None:
    """Outputs and gradients of two calls, and the parameters after them."""
    torch.manual_seed(0)
    model = kind().double()
    plan = planned(model, features(WIDTH), tp, phase="train")
    assert any("@" in p.placement for m in plan.modules.values() for p in m.parameters.values())
    (x,) = features(WIDTH)(2, 7)

    def use(local: nn.Module) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        for i in range(2):
            outputs[f"output {i}"] = y = local(x)
            y.sum().backward()
        own = dict(local.named_parameters())
        grads = {n: p.grad for n, p in own.items() if p.grad is not None}
        full = {f"gradient {n}": g for n, g in full_tensors(local, grads).items()}
        return {**outputs, **full, **full_tensors(local, own)}

    want = use(copy.deepcopy(model))
    for found in run_ranks(tp, lambda mesh: use(apply(copy.deepcopy(model), plan, mesh))):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)


class OfInput(Pair):
    """What is set is no parameter."""

    def change(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y.data = y.data.clamp(-1, 1)
        return self.down(y)


class OfArrays(nn.Linear):
    """It uses NumPy, so it is not traced."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.05, 0.05)
        return super().forward(torch.from_numpy(input.detach().numpy() * 2))


class NotTraced(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.up = OfArrays(WIDTH, INNER)

    def change(self) -> None:
        pass


class Shorter(Pair):
    def change(self) -> None:
        self.scale.data = self.scale.data[:1]


@pytest.mark.parametrize("kind", [OfInput, NotTraced, Shorter])
def test_what_the_trace_cannot_show_is_refused(kind: type[Pair]) -> None:
    with pytest.raises(ModelError, match="data of a tensor|changes what it is given"):
        planning.plan(kind().double(), tp=2, args=features(WIDTH)(3, 19))


def test_compiled_code_that_sets_data_is_refused() -> None:
    model = Clipped().double()
    plan = planned(model, features(WIDTH), 2)
    (x,) = features(WIDTH)(2, 7)

    def rank(mesh: Mesh) -> str:
        local = torch.compile(apply(copy.deepcopy(model), plan, mesh), backend="eager")
        with pytest.raises(
            UsageError, match=r"sets the data of 'up.weight'.*data\.copy_"
        ) as raised:
            local(x)
        return str(raised.value)

    assert len(run_ranks(2, rank)) == 2


def test_a_module_that_is_called_directly_or_again_sets_data() -> None:
    """Checkpointing runs a module again in the backward pass, so it sets twice."""
    torch.manual_seed(0)
    model = nn.Sequential(OfRows(), Clipped()).double()
    plan = planned(model, features(WIDTH), 2, phase="train")
    (x,) = features(WIDTH)(2, 7)

    def use(local: nn.Module) -> dict[str, Tensor]:
        first, second = local.children()
        y = checkpoint(second, first(x), use_reentrant=False)
        y.sum().backward()
        z = checkpoint(local, x, use_reentrant=False)
        z.sum().backward()
        own = dict(local.named_parameters())
        grads = {n: p.grad for n, p in own.items() if p.grad is not None}
        full = {f"gradient {n}": g for n, g in full_tensors(local, grads).items()}
        return {"y": y, "z": z, **full, **full_tensors(local, own)}

    want = use(copy.deepcopy(model))
    for found in run_ranks(2, lambda mesh: use(apply(copy.deepcopy(model), plan, mesh))):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)
