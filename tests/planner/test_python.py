"""Python that models are written in: compiled functions, closures, methods and tensors kept."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import ModelError, PlanError
from shardwright.runtime.api import apply
from tests import planning
from tests.planner.equal import assert_equal, features, planned
from tests.planner.mlps import WIDTH, Mlp
from tests.ranks import run_ranks

HEADS = 4


@torch.jit.script
def biased(x: Tensor, bias: Tensor) -> Tensor:
    y = x + bias
    return y * 0.5 * (1.0 + torch.tanh(0.8 * y * (1 + 0.04 * y * y)))


@torch.jit.script
def by_heads(x: Tensor, heads: int) -> Tensor:
    b, t, c = x.size()
    return x.view(b, t, heads, c // heads).transpose(1, 2)


recorded: Any = torch.jit.trace(lambda x: x.relu() * 2, torch.zeros(2, 7, WIDTH))


class Compiled(Mlp):
    """A fused activation."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.activation = nn.Parameter(torch.zeros(self.hidden)), biased

    def between(self, y: Tensor) -> Tensor:
        return biased(y, self.bias)


class CompiledHeads(nn.Module):
    """Sizes that compiled code computes of an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (by_heads(part(x), self.heads) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.o(y.reshape(*x.shape[:2], -1))


class Recorded(nn.Module):
    """Compiled code that there is no Python of."""

    def forward(self, x: Tensor) -> Tensor:
        return recorded(x)


class Around(nn.Module):
    """Something, and an MLP that can be split."""

    def __init__(self, made: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.made, self.mlp = made(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.made(x))


class SomeNone(nn.Module):
    """Lists in which some have nothing."""

    def __init__(self) -> None:
        super().__init__()
        norms = nn.ModuleList([nn.LayerNorm(WIDTH), None, None])  # type: ignore[list-item]
        self.layers = nn.ModuleList([norms, Mlp(), None])  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        norms, block, residual = self.layers
        before, *after = norms  # type: ignore[misc]
        assert residual is None and not any(after)
        return x + block(before(x))


class Closure(nn.Module):
    """A function among its attributes calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        parts = self.parts = nn.ModuleDict(
            {"up": nn.Linear(WIDTH, 128), "down": nn.Linear(128, WIDTH)}
        )
        self.call = lambda x: parts["down"](parts["up"](x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(x)


class Methods(nn.Module):
    """Bound methods among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.inner, self.outer = self.mlp.forward, functools.partial(self.scaled, by=2.0)

    def scaled(self, x: Tensor, by: float) -> Tensor:
        return by * self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


class Masked(nn.Module):
    """A weight that is masked anew each time, in place."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data *= self.mask
        return self.mlp(self.linear(x))


class Converts(nn.Module):
    """A module that is converted as it runs, as routers of mixtures are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mlp = nn.Linear(WIDTH, WIDTH, dtype=torch.float32), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.linear.to(x.dtype)
        return self.mlp(self.linear(x))


class Normed(Mlp):
    """Weights that hooks compute and keep as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.utils.weight_norm(part) for part in (self.up, self.down))


CASES: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "a compiled function": (Compiled, 0.55),
    "sizes in compiled code": (CompiledHeads, 0.55),
    "compiled code without Python": (lambda: Around(Recorded), 0.55),
    "lists with None": (SomeNone, 0.55),
    "bound methods": (Methods, 0.55),
    "a weight masked in place": (Masked, 0.7),
    "a conversion on the way": (Converts, 0.7),
}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole_model(name: str, tp: int) -> None:
    """Copies do, too; what can be split is."""
    make, share = CASES[name]
    model = copy_once(make()).double()
    plan = planned(model, features(WIDTH), tp)
    assert (
        plan.predicted.parameter_bytes[0]
        < (share if tp == 2 else 1) * plan.predicted.unsharded_bytes
    )
    assert_equal(model, features(WIDTH), plan, collectives=False)


def copy_once(model: nn.Module) -> nn.Module:
    """Without what cannot be copied: a model may keep a compiled function."""
    vars(model).pop("activation", None)
    return copy.deepcopy(model)


def test_a_compiled_function_among_the_attributes() -> None:
    assert planned(Compiled().double(), features(WIDTH), 2).opaque == {}


def test_weights_that_hooks_keep() -> None:
    """Such a model cannot be copied as it is, with what was computed from its parameters."""
    model = Normed().double()
    assert model.up.weight.grad_fn is not None
    plan = planned(model, features(WIDTH), 2)
    with torch.no_grad():
        model(*features(WIDTH)(2, 7))
    assert_equal(model, features(WIDTH), plan)


def test_a_function_that_calls_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls those of the model that it is in; where it would not, that is an error."""
    model = Closure().double()
    plan = planned(model, features(WIDTH), 2)
    assert plan.predicted.parameter_bytes[0] < 0.55 * plan.predicted.unsharded_bytes
    with pytest.raises(PlanError, match="'call' is a function with modules of another Closure"):
        run_ranks(2, lambda mesh: apply(copy.deepcopy(model), plan, mesh))

    def rebuilt(self: nn.Module, _memo: Any) -> nn.Module:
        new = Closure().double()
        new.load_state_dict(self.state_dict())
        return new

    monkeypatch.setattr(Closure, "__deepcopy__", rebuilt, raising=False)
    assert_equal(model, features(WIDTH), plan)


def test_a_compiled_module_is_refused() -> None:
    compiled: Any = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.zeros(2, WIDTH))
    model = nn.Sequential(Mlp(), compiled)
    with pytest.raises(ModelError, match="'1' in Sequential is compiled by TorchScript"):
        planned(model, features(WIDTH), 2)


def test_one_tensor_as_arguments() -> None:
    x = torch.randn(3, 19, WIDTH)
    assert planning.plan(Mlp(), 2, args=x) == planning.plan(Mlp(), 2, args=(x,))


def test_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """What model code fails at while it is tried is a reason, and no traceback on stderr."""

    class Guarded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return torch.cat((x, x[0]), 1)
            except RuntimeError:
                return x * 2

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    try:
        planned(Around(Guarded).double(), features(WIDTH), 2)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
