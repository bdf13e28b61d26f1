"""What code asks of tensors and modules otherwise than by ops: identity, classes, state outside."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from shardwright.errors import ModelError
from shardwright.runtime.api import apply
from tests.planner.equal import assert_equal, close, features, ids, planned
from tests.ranks import run_ranks

WIDTH, INNER = 24, 48


class Net(nn.Module):
    """Two layers; `do` runs between them."""

    def __init__(self, do: Callable[[Net, Tensor], Tensor] = lambda net, h: h) -> None:
        super().__init__()
        self.do = do
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.do(self, self.up(x).relu()))


def _asks_for_parameters(net: Net, h: Tensor) -> Tensor:
    if isinstance(net.up.weight, nn.Parameter) and net.up.weight.requires_grad:
        h = h * 2
    return h + sum(p.square().sum() for p in net.parameters() if isinstance(p, nn.Parameter))


@pytest.mark.parametrize("tp", [2, 3])
def test_weights_are_parameters(tp: int) -> None:
    """Both in the trace and on ranks, also where no gradient is wanted."""
    model = Net(_asks_for_parameters).double()
    plan = planned(model, features(WIDTH), tp)
    assert_equal(model, features(WIDTH), plan, collectives=False)
    (x,) = features(WIDTH)(2, 7)

    @torch.no_grad()
    def run(net: nn.Module) -> Tensor:
        return net(x)

    for found in run_ranks(tp, lambda mesh: run(apply(copy.deepcopy(model), plan, mesh))):
        close(found, run(model), "output")


class Lists(nn.Module):
    """Makes containers and a layer of its weights in each call: there they must be parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.weights = nn.ParameterList([torch.empty(WIDTH, INNER), torch.empty(INNER, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weights[:2]
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = self.net.up.weight
        named = nn.ParameterDict({"down": self.net.down.weight})
        return F.linear(layer(x).relu(), named["down"]) + (x @ first).relu() @ second


@pytest.mark.parametrize("tp", [2, 3])
def test_parameters_in_containers_that_code_makes(tp: int) -> None:
    """They would be copies, without gradients for the weights, or be refused by torch."""
    model = Lists().double()
    plan = planned(model, features(WIDTH), tp)
    assert_equal(model, features(WIDTH), plan, collectives=False)


class Attends(nn.Module):
    """Does something else with one tensor for both arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.o = nn.Linear(INNER, WIDTH)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.o(self.q(query) * (2 if query is key else self.k(key)))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attends = Attends()

    def forward(self, x: Tensor) -> Tensor:
        return self.attends(x, x)


class Tied(nn.Module):
    """Asks whether its head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        scale = 2 if self.head.weight is self.embed.weight else 1
        return self.head(self.embed(x)) * scale


class Remembers(Net):
    """Computes nothing for the tensor of its last call."""

    def __init__(self) -> None:
        super().__init__()
        self.last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is None or self.last[0] is not x:
            self.last = x, super().forward(x)
        return self.last[1]


def _finds_again(net: Net, h: Tensor) -> Tensor:
    again = nn.Identity()(h)
    return h * 2 if any(kept is again for kept in (h, net.up)) else h * 3


class AsksForClass(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        return self.down(h * 2 if type(self.up) is nn.Linear else h * 3)


def _asks_for_layers(net: Net, h: Tensor) -> Tensor:
    last = net.down
    for layer in (net.up, last):
        h = h * 2 if layer is last else h + 1
    return h


def _draws(net: Net, h: Tensor) -> Tensor:
    return h * 2 if random.random() < 0.5 else h * 3


def _masks_by_draws(net: Net, h: Tensor) -> Tensor:
    return h * torch.as_tensor(numpy.random.rand(1) < 0.5)


def _draws_without_use(net: Net, h: Tensor) -> Tensor:
    drawn = random.random()
    return h * 2 if net.training and drawn < 0.5 else h


def test_numbers_may_be_drawn_that_nothing_is_computed_with() -> None:
    model = Net(_draws_without_use).eval()
    assert_equal(model, features(WIDTH), planned(model, features(WIDTH), 2))


def test_modules_may_be_compared() -> None:
    model = Net(_asks_for_layers)
    assert_equal(model, features(WIDTH), planned(model, features(WIDTH), 2))


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (Around(), features(WIDTH), r"'Attends.forward': its code asks .* \(query is key\)"),
        (Tied(), ids(30), r"'Tied.*: its code asks .* \(self.head.weight is self.embed.weight\)"),
        (Remembers(), features(WIDTH), r"'Remembers.forward': .* \(self.last\[0\] is not x\)"),
        (Net(_finds_again), features(WIDTH), r"'_finds_again.*: .* \(kept is again\)"),
        (AsksForClass(), features(WIDTH), r"type\(self.up\) is nn.Linear.*use isinstance"),
        (Net(_draws), features(WIDTH), "draws random numbers with Python or NumPy: draw them with"),
        (Net(_masks_by_draws), features(WIDTH), "draws random numbers with Python or NumPy"),
    ],
)
def test_what_ranks_would_answer_otherwise_is_refused(
    model: nn.Module, inputs: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        planned(model, inputs, 2)


def _kept(net: Net, h: Tensor, kept: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006
    before = kept.get("mean", h)
    kept["mean"] = h.detach().mean((0, 1))
    return h - before


class InClass(Net):
    """Keeps a tensor in its class."""

    mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        h = h if type(self).mean is None else h - type(self).mean
        type(self).mean = h.detach().mean((0, 1))
        return self.down(h)


LOG: list[Tensor] = []


def _logged(net: Net, h: Tensor) -> Tensor:
    LOG.append(h.detach().mean((0, 1)))
    return h - LOG[0]


@pytest.mark.parametrize("model", [Net(_kept), InClass(), Net(_logged)])
def test_what_is_left_outside_of_modules_is_not_gone_on_from(model: nn.Module) -> None:
    with pytest.raises(ModelError, match="an earlier call left outside of modules.*self.x ="):
        planned(model.double(), features(WIDTH), 2)
    assert _kept.__defaults__ == ({},)
    assert InClass.mean is None and not LOG


def _table(net: Net, h: Tensor, tables: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    length = h.shape[1]
    if length not in tables:
        tables[length] = torch.arange(length, dtype=h.dtype)[:, None]
    return h + tables[length]


def test_a_table_by_length_may_be_kept_outside() -> None:
    model = Net(_table).double()
    assert_equal(model, features(WIDTH), planned(model, features(WIDTH), 2))


class InSharedClass(nn.Module):
    """Leaves a tensor in its class for another module of the class, which has other parameters."""

    left: Tensor | None = None

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.leaves = leaves
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        if leaves:
            self.scale = nn.Parameter(torch.ones(INNER))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        if self.leaves:
            type(self).left = h * self.scale
        else:
            assert type(self).left is not None
            h = h + type(self).left
        return self.down(h)


def test_modules_of_a_class_share_its_attributes() -> None:
    plan = planned(nn.Sequential(InSharedClass(True), InSharedClass(False)), features(WIDTH), 2)
    assert "@" in plan.modules["0.up"].parameters["weight"].placement
    assert InSharedClass.left is None


def _copies(net: Net, h: Tensor) -> Tensor:
    return copy.deepcopy(net.down)(h).relu() @ net.up.weight.T


def _differentiates(net: Net, h: Tensor) -> Tensor:
    return torch.autograd.grad(h.square().sum(), h)[0]


def _loads(net: Net, h: Tensor) -> Tensor:
    net.down.load_state_dict(net.down.state_dict())
    return h


def _calls_with(net: Net, h: Tensor) -> Tensor:
    return F.relu(functional_call(net.up, {"weight": net.up.weight * 2}, (h[..., :WIDTH],)))


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (_copies, "cannot copy modules or parameters: make the copy in __init__"),
        (_differentiates, "cannot run backward.. or torch.autograd.grad"),
        (_loads, "loads a state dict into a Linear: .*copy_"),
        (_calls_with, "calls a Linear with other parameters .*parametrize"),
    ],
)
def test_refusals_say_what_to_do_instead(do: Callable[[Net, Tensor], Tensor], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        planned(Net(do), features(WIDTH), 2)
