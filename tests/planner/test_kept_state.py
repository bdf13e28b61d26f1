"""What modules keep in attributes: the calls behind the first are as proven as that."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import RUN, close, features, planned, randomize, weigh
from tests.ranks import run_ranks


class Mlp(nn.Module):
    """Up, something, and down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.kept: Any = None
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x).relu()))

    def between(self, h: Tensor) -> Tensor:
        return h


class Mean(Mlp):
    """Goes on with a mean over what ranks have parts of."""

    def between(self, h: Tensor) -> Tensor:
        if self.kept is not None:
            h = h * self.kept.mean(-1, keepdim=True).sigmoid()
        self.kept = h.detach().mean((0, 1))
        return h


class Attached(Mlp):
    """Goes on with what has a gradient."""

    def between(self, h: Tensor) -> Tensor:
        if self.kept is not None:
            h = h - self.kept[1].amax(-1, keepdim=True)
        self.kept = (1, h.mean((0, 1)))
        return h


class InTraining(Mlp):
    """Keeps something in training mode alone."""

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            if self.kept is not None:
                h = h - self.kept.amax(-1, keepdim=True)
            self.kept = h.detach().mean((0, 1))
        return h


class InTables(Mlp):
    """Keeps it in a table, and in a list of one."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, Tensor] = {}
        self.last: deque[Tensor] = deque(maxlen=1)

    def between(self, h: Tensor) -> Tensor:
        if self.last:
            h = h - self.table["h"].amax(-1, keepdim=True) + self.last[-1].sum()
        self.table["h"] = h.detach().mean((0, 1))
        self.last.append(h.detach().mean((0, 1)))
        return h


@dataclass
class Held:
    h: Tensor | None = None


class InObject(Mlp):
    """Keeps it in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Held()

    def between(self, h: Tensor) -> Tensor:
        if self.kept.h is not None:
            h = h - self.kept.h.amax(-1, keepdim=True)
        self.kept.h = h.detach().mean((0, 1))
        return h


class Constant(Mlp):
    """Keeps a tensor of a list of known numbers, as some models keep offsets of positions."""

    def between(self, h: Tensor) -> Tensor:
        if self.kept is not None:
            h = h * self.kept.mean()
        self.kept = torch.tensor([torch.arange(4.0).max() + n for n in (1, 2)], device=h.device)
        return h


class Counted(Mlp):
    """Counts its calls, and computes with that."""

    def between(self, h: Tensor) -> Tensor:
        self.times += 1
        return h * self.times


class InTurns(Mlp):
    """Does the one and the other in turns."""

    def between(self, h: Tensor) -> Tensor:
        self.times = (self.times + 1) % 2
        return h.softmax(-1) if self.times else h


class Shown(Mlp):
    """Keeps what nothing in it asks for."""

    def between(self, h: Tensor) -> Tensor:
        self.kept, self.times = h.detach().mean((0, 1)), h.shape[1]
        return h


class Flipped(Mlp):
    """Keeps something in each second call, and deletes it in the next."""

    def between(self, h: Tensor) -> Tensor:
        if hasattr(self, "there"):
            h = h - self.there.amax(-1, keepdim=True)
            del self.there
        else:
            self.there = h.detach().mean((0, 1))
        return h


class OfAnother(Mlp):
    """Goes on with what a module within left in the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Shown()

    def between(self, h: Tensor) -> Tensor:
        if self.inner.kept is not None:
            h = h - self.inner.kept.amax(-1, keepdim=True)
        return h + self.inner.between(h)


class Started(Mlp):
    """Begins with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(24, dtype=torch.float64)

    def between(self, h: Tensor) -> Tensor:
        h = torch.tanh(h + self.kept)
        self.kept = h.detach().mean((0, 1))
        return h


class Later(Mlp):
    """Does something else from some call on."""

    def between(self, h: Tensor) -> Tensor:
        self.times += 1
        return h.softmax(-1) if self.times > 4 else h


class Table(Mlp):
    """Makes a table as long as it needs."""

    def between(self, h: Tensor) -> Tensor:
        if h.shape[1] > self.times:
            self.times = h.shape[1]
            self.kept = torch.arange(self.times, dtype=h.dtype).cos()
        return h * self.kept[: h.shape[1], None]


class Emptied(Mlp):
    """Fills a table in eval mode alone, which is emptied where it is to train."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> Any:
        """As torch, and empties the table."""
        if mode:
            self.table = {}
        return super().train(mode)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            return h * self.up.bias.softmax(-1)
        if "h" not in self.table:
            self.table["h"] = self.up.bias.softmax(-1)
        return h * self.table["h"]


class Book(Mlp):
    """Looks up what is nearest in a table that it makes of a buffer."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(5, 24, dtype=torch.float64))

    def between(self, h: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.rows / 2
        near = torch.cdist(h.flatten(0, 1), self.kept).argmin(-1)
        return h + self.kept[near].view_as(h)


def calls(model: nn.Module, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What three calls of `model` give, in eval mode and in training mode, and all gradients."""
    out = [model(x * n) for n in (1, 2, 3)]
    model.train()
    out += [model(x * n) for n in (1, 2, 3)]
    out += [model.eval()(x)]
    weigh(out).backward()
    return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_all_equal(module: nn.Module, plan: Plan) -> None:
    """Compare call after call of a split model with those of the whole one."""
    torch.manual_seed(0)
    randomize(module)
    (x,) = features(12)(*RUN)

    def rank(mesh: Mesh) -> Any:
        local = apply(copy.deepcopy(module), plan, mesh)
        out, gradients = calls(local, x)
        return out, full_tensors(local, gradients)

    want = calls(copy.deepcopy(module), x)
    for found in run_ranks(2, rank):
        assert found[1].keys() == want[1].keys()
        for one, other in zip(found[0], want[0], strict=True):
            close(one, other, "output")
        for name, gradient in want[1].items():
            close(found[1][name], gradient, name)


def halved(plan: Plan) -> set[str]:
    """The names of modules that are split."""
    return {name for name, module in plan.modules.items() if module.parameters}


PROVEN = [
    *(Mean, Attached, InTraining, InTables, InObject, Started, Table, Emptied, Constant),
    *(Counted, InTurns, Flipped, OfAnother, Shown),
]


@pytest.mark.parametrize("kind", PROVEN)
def test_what_is_kept_is_right_in_the_next_call(kind: Callable[[], nn.Module]) -> None:
    module = kind().double()
    before = {name: v for name, v in vars(module).items() if name[0] != "_"}
    plan = planned(module, features(12), 2)
    assert all(call.training for call in plan.calls)
    assert {name: vars(module)[name] for name in before} == before
    assert halved(plan)
    assert_all_equal(module, plan)


@pytest.mark.parametrize("kind", [Flipped, Book])
def test_a_model_that_was_called_before_goes_on_from_there(kind: Callable[[], nn.Module]) -> None:
    module = kind().double()
    with torch.no_grad():
        module(*features(12)(*RUN))
    plan = planned(module, features(12), 2)
    assert halved(plan)
    assert_all_equal(module, plan)


def test_each_block_keeps_its_own() -> None:
    module = nn.Sequential(*(Mean() for _ in range(5))).double()
    assert_all_equal(module, planned(module, features(12), 2))


def test_a_number_that_decides_is_named() -> None:
    with pytest.raises(ModelError, match=r"Later: it keeps 'times' from call to call"):
        planned(Later().double(), features(12), 2)


def test_a_module_that_decides_by_a_number_stays_whole() -> None:
    module = nn.Sequential(Later(), Mlp()).double()
    plan = planned(module, features(12), 2)
    assert halved(plan) == {"1.up", "1.down"}
    assert_all_equal(module, plan)


def test_what_is_kept_for_users_costs_no_call() -> None:
    kept, plain = (planned(kind().double(), features(12), 2) for kind in (Shown, Mlp))
    assert [change.slot for change in kept.modules[""].keeps] == ["kept"]
    assert {name: m for name, m in kept.modules.items() if name} == plain.modules
    assert kept.calls == plain.calls
    assert len(planned(Mean().double(), features(12), 2).calls) == len(plain.calls)
