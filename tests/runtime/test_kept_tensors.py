"""Tensors that modules set as their attributes: losses, say, that users add up behind a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import close, features, planned, randomize, weigh
from tests.ranks import run_ranks

D = 12


class Mixture(nn.Module):
    """Its router's losses, as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 24), nn.ReLU(), nn.Linear(24, D)) for _ in range(4)
        )
        self.aux_loss: Any = None

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        logits = self.gate(x)
        shares = logits.softmax(-1)
        weights, chosen = shares.topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        load = F.one_hot(chosen, 4).to(x.dtype).mean((0, 1))
        self.aux_loss = (load * shares.mean(0)).sum() * 4
        self.router_logits = logits
        return out.view(shape)


class Mlp(nn.Module):
    """Of what ranks have parts of, it keeps sums, norms and all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 48), nn.Linear(48, D)
        self.table: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        self.sparsity = hidden.abs().mean()
        self.norms = hidden.pow(2).sum(-1)
        self.hidden = hidden
        self.detached = hidden.detach()
        if self.training:
            self.only_in_training = hidden.mean()
        return x + self.down(hidden)


class Contained(Mlp):
    """In lists and tables."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        self.table["sparsity"] = hidden.abs().mean()
        self.both = (hidden.mean(), [hidden.sum(-1)])
        return x + self.down(hidden)


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))
        self.total: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.total = torch.zeros((), dtype=x.dtype)
        for layer in self.layers:
            x = x + layer(x)
            if hasattr(layer, "sparsity"):
                self.total = self.total + layer.sparsity
        return x


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mixture": lambda: Net(Mixture),
    "mixture alone": Mixture,
    "mlp": lambda: Net(Mlp),
    "mlp alone": Mlp,
    "contained": lambda: Net(Contained),
}


def kept(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that is in an attribute of a module, by its place."""

    def within(value: Any, at: str) -> Iterator[tuple[str, Tensor]]:
        if isinstance(value, Tensor):
            yield at, value
        elif isinstance(value, (list, tuple)):
            for i, part in enumerate(value):
                yield from within(part, f"{at}.{i}")
        elif isinstance(value, dict):
            for key, part in value.items():
                yield from within(part, f"{at}.{key}")

    for path, module in model.named_modules():
        for name, value in [*vars(module).items()]:
            if not name.startswith("_"):
                yield from within(value, f"{path}.{name}")


def used(model: nn.Module, call: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """What is in attributes behind a `call`, and gradients of all of that and of its output."""
    loss = weigh(call(model))
    found = dict(kept(model))
    for value in found.values():
        if value.requires_grad:
            loss = loss + weigh(value * value)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    values = {name: value.detach() for name, value in found.items()}
    return {**values, **full_tensors(model, grads)}


def compared(name: str, tp: int, call: Callable[[nn.Module], Any]) -> float:
    """Compare `used` on ranks with that of the whole; a rank's share of the bytes."""
    torch.manual_seed(0)
    base = KINDS[name]().double()
    randomize(base)
    plan = planned(copy.deepcopy(base), features(D), tp)
    want = used(copy.deepcopy(base), call)

    def work(mesh: Mesh) -> None:
        found = used(apply(copy.deepcopy(base), plan, mesh), call)
        assert found.keys() == want.keys()
        for key, value in want.items():
            close(found[key], value, key)

    run_ranks(tp, work)
    return max(plan.predicted.parameter_bytes) / plan.predicted.unsharded_bytes


X = torch.randn(2, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_what_modules_keep_is_whole_behind_a_call(name: str, tp: int) -> None:
    share = compared(name, tp, lambda model: model(X))
    assert share < {2: 0.55, 3: 0.40}[tp]


def _twice(model: nn.Module) -> Any:
    model(X * 2)
    return model(X)


def _in_training_first(model: nn.Module) -> Any:
    """What is set in training mode alone is still there, and is whole but once."""
    model.train()(X)
    return model.eval()(X)


def _a_layer_alone(model: nn.Module) -> Any:
    model(X)
    return model.get_submodule("layers.1")(X)


def _without_gradients(model: nn.Module) -> Any:
    with torch.no_grad():
        model(X)
    return model.get_submodule("layers.0")(X)


@pytest.mark.parametrize(
    "call",
    [_twice, _in_training_first, _a_layer_alone, _without_gradients],
    ids=lambda f: f.__name__,
)
def test_in_calls_of_all_kinds(call: Callable[[nn.Module], Any]) -> None:
    compared("mlp", 2, call)
