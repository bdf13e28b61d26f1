"""Training mode: what a split model does there is what the whole one does, or it is refused."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.plan_file import ModulePlan, Plan
from shardwright.planner.search.emitted_plan import IN_EVAL_MODE
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning, zoo
from tests.planner.equal import RUN, features, planned, randomize, weigh
from tests.ranks import run_ranks

WIDTH, INNER = 12, 24
INPUTS = features(WIDTH)
REFUSED = "is in training mode, and its plan is proven for eval mode alone"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.inner(self.up(x)))

    def inner(self, h: Tensor) -> Tensor:
        return F.gelu(h)


class Scales(Mlp):
    """Computes with the length of what is split while it trains."""

    def inner(self, h: Tensor) -> Tensor:
        return h / (1 + h.pow(2).mean(-1, keepdim=True)) if self.training else F.gelu(h)


class Averages(Mlp):
    """Keeps an average of what is split, changed in place."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(INNER))

    def inner(self, h: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return F.gelu(h - self.average)


class Replaces(Averages):
    """Puts a new one into its place."""

    def inner(self, h: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * h.detach().mean((0, 1))
        return F.gelu(h - self.average)


class Normed(Mlp):
    """Statistics of the batch, by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(INNER)

    def inner(self, h: Tensor) -> Tensor:
        return F.gelu(self.norm(h.transpose(1, 2)).transpose(1, 2))


class NormedSum(Mlp):
    """In eval mode the norm is linear, and may take a pending sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


class Helped(Mlp):
    """A head that is for training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = nn.Linear(INNER, 5)

    def forward(self, x: Tensor) -> Any:
        h = self.inner(self.up(x))
        return (self.down(h), self.helper(h)) if self.training else (self.down(h),)


class Told(Mlp):
    """Does not ask for its mode, but keeps what it was told."""

    exact = True

    def train(self, mode: bool = True) -> Told:
        self.exact = not mode
        return super().train(mode)

    def inner(self, h: Tensor) -> Tensor:
        return F.gelu(h) if self.exact else h / (1 + h.norm(dim=-1, keepdim=True))


class Drops(Mlp):
    """Dropout, though of nothing."""

    def inner(self, h: Tensor) -> Tensor:
        return F.dropout(F.gelu(h), 0.0, self.training)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Skips(Stack):
    """Leaves out blocks at random: with a probability of 0 as it stands."""

    share = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.share:
                continue
            x = layer(x)
        return self.head(x)


class ShowsAll(Stack):
    """The head of every block, while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for layer in self.layers:
            x = layer(x)
            if self.training:
                out.append(self.head(x))
        return torch.stack(out) if self.training else self.head(x)


class Tosses(Mlp):
    """Asks Python for a random number."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.5 else super().forward(x)


class DropsLayers(Mlp):
    """Drops a layer by a number that it draws: with a probability of 0 as it stands."""

    share, most = 0.0, 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.most):
            if self.training and random.uniform(0, 1) < self.share:
                continue
            x = super().forward(x)
        return x


class DropsFewLayers(DropsLayers):
    """With a probability so small that no sample shows it."""

    share = 1e-6


class Chooses(Mlp):
    """Chooses by a number that is nearly always the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.randint(0, 10**6) == 0 else super().forward(x)


class MadeOfDraws(Mlp):
    """Makes tensors of what it draws, in a way that a trace does not see."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + torch.Tensor([random.random(), 1.0]).to(x)[1]
        return super().forward(x)


class Multiplies(Mlp):
    """Computes with what it draws."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * random.uniform(1, 2)) if self.training else super().forward(x)


def drawn(*shape: int) -> Any:
    """What to leave out, of NumPy's generator."""
    return numpy.random.rand(*shape) < 0.5


class Masks(Mlp):
    """Leaves out what NumPy draws, as models of sound do."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            left = torch.tensor(drawn(x.shape[0], x.shape[1]), device=x.device)
            x = x.masked_fill(left[..., None], 0.0)
        return super().forward(x)


class LooksAtMasks(Mlp):
    """Goes on otherwise by what NumPy drew."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and drawn(3).any() else super().forward(x)


class DropsSome(Mlp):
    """Dropout of what is split."""

    def inner(self, h: Tensor) -> Tensor:
        return F.dropout(F.gelu(h), 0.3, self.training)


class DropsAlways(Mlp):
    """Dropout in eval mode, too."""

    def inner(self, h: Tensor) -> Tensor:
        return F.dropout(F.gelu(h), 0.3, True)


class NoiseToTrain(Mlp):
    """Random numbers that torch draws in training mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x) if self.training else x)


GIVEN = torch.randn(*RUN, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def results(model: nn.Module, training: bool, gather: Any = lambda model, found: found) -> Any:
    """Outputs, gradients and buffers after two passes in a mode."""
    model.train(training)
    x = GIVEN.clone().requires_grad_()
    outputs = [model(x), model(x)]
    weigh(outputs).backward()
    assert x.grad is not None
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    held = {n: b.clone() for n, b in model.named_buffers() if b.is_floating_point()}
    found = {f"output {i}": t for i, t in enumerate(tree_leaves(outputs))}
    return found | {"input": x.grad} | gather(model, grads | held)


def made(kind: type[nn.Module], tp: int = 2, **options: Any) -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = kind().double()
    randomize(model)
    return model, planned(model, INPUTS, tp, **options)


def assert_alike(model: nn.Module, plan: Plan, *modes: bool) -> None:
    wanted = [results(copy.deepcopy(model), mode) for mode in modes]

    def rank(mesh: Mesh) -> list[dict[str, Tensor]]:
        split = [apply(copy.deepcopy(model), plan, mesh) for _ in modes]
        return [results(one, mode, full_tensors) for one, mode in zip(split, modes, strict=True)]

    for found in run_ranks(plan.world_size, rank):
        for one, other in zip(found, wanted, strict=True):
            assert one.keys() == other.keys()
            for name, tensor in other.items():
                torch.testing.assert_close(
                    one[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
                )


def is_split(plan: Plan, name: str) -> bool:
    module, _, parameter = name.rpartition(".")
    entry = plan.modules[module].parameters.get(parameter) if module in plan.modules else None
    return entry is not None and "@" in entry.placement


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    "kind",
    [Scales, Averages, Replaces, Normed, NormedSum, Helped, Told, Drops, Skips, DropsLayers],
)
def test_trains_as_the_whole_model(kind: type[nn.Module], tp: int) -> None:
    model, plan = made(kind, tp)
    assert any(call.training for call in plan.calls)
    assert_alike(model, plan, True, False)


def test_what_changes_in_place_is_split() -> None:
    assert is_split(made(Averages)[1], "average")
    assert all(is_split(made(Normed)[1], f"norm.{n}") for n in ("weight", "running_mean"))


def test_parts_may_be_in_other_modes() -> None:
    """Norms that are frozen, as many train: both modes are in one plan."""
    model, plan = made(Normed)

    def frozen(split: nn.Module) -> Tensor:
        split.train()
        split.norm.eval()  # type: ignore[operator,union-attr]
        return split(GIVEN)

    want = frozen(copy.deepcopy(model))
    for got in run_ranks(2, lambda mesh: frozen(apply(copy.deepcopy(model), plan, mesh))):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "kind",
    [ShowsAll, Tosses, Masks, LooksAtMasks, DropsFewLayers, Chooses, MadeOfDraws, Multiplies],
)
def test_what_is_not_proven_is_refused(kind: type[nn.Module]) -> None:
    """Of the model and of a module in it that is called by itself."""
    model, plan = made(kind)
    assert not any(call.training for call in plan.calls)
    assert_alike(model, plan, False)

    def rank(mesh: Mesh) -> None:
        split = apply(copy.deepcopy(model), plan, mesh).train()
        for called in (split, next(m for m in split.modules() if isinstance(m, nn.Linear))):
            with pytest.raises(UsageError, match=REFUSED):
                called(GIVEN)

    run_ranks(2, rank)


def test_who_plans_to_train_is_told() -> None:
    assert IN_EVAL_MODE in made(Tosses, phase="train")[1].solver.note
    assert IN_EVAL_MODE not in made(Tosses)[1].solver.note
    model, plan = made(ShowsAll, phase="train")  # all blocks are traced, then
    assert IN_EVAL_MODE not in plan.solver.note
    assert_alike(model, plan, True, False)


def test_ranks_draw_for_the_whole() -> None:
    """Also where their parts are not equal; what is whole needs no more than to be drawn alike."""
    for tp in (2, 5):
        plan = made(DropsSome, tp)[1]
        assert [drawn.placement for drawn in plan.modules[""].draws] == ["?, ?, 24@tp"]
        assert plan.calls[0].training and plan.calls[0].draws == "training"
    assert {call.draws for call in made(DropsAlways)[1].calls} == {"always"}
    calls = made(NoiseToTrain)[1].calls
    assert {call.draws for call in calls if not call.training} <= {""}
    assert any(call.draws for call in calls if call.training)
    plan = made(Drops, 5)[1]
    assert plan.calls[0].training and not plan.calls[0].draws
    assert not any(module.draws for module in plan.modules.values())


class DropsTwice(Mlp):
    """One module drops of what is split, and then of what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.drop(F.gelu(self.up(x)))))


def test_calls_of_a_module_that_draw_for_others_must_draw_as_many() -> None:
    """Where one dropped elements of a larger part, it would drop others from then on."""
    for tp, equal in ((2, True), (5, False)):
        plan = made(DropsTwice, tp)[1]
        assert not any(module.draws for module in plan.modules.values())
        assert plan.calls[0].training == equal


def test_dropout_changes_no_more_of_a_plan() -> None:
    plans = [made(kind)[1] for kind in (Mlp, DropsSome)]
    drawn = plans[1].modules[""]
    assert drawn == ModulePlan(draws=drawn.draws, takes=drawn.takes, gives=drawn.gives)
    assert plans[1].modules == {**plans[0].modules, "": drawn}
    assert [call.model_copy(update={"draws": ""}) for call in plans[1].calls] == plans[0].calls


@pytest.mark.parametrize("name", ["gpt2", "bart", "mixtral"])
def test_text_models_are_proven_in_both(name: str) -> None:
    _, model = zoo.build(name)
    assert all(call.training for call in planning.plan(model, tp=2).calls)


def test_nobody_writes_it_into_a_plan() -> None:
    model, plan = made(Tosses)
    calls = [call.model_copy(update={"training": True}) for call in plan.calls]
    edited = plan.model_copy(update={"calls": calls})
    with pytest.raises(PlanError, match="edited"):
        run_ranks(2, lambda mesh: apply(copy.deepcopy(model), edited, mesh))


def test_modules_that_come_later_train_too() -> None:
    """The list of modules whose mode is looked at follows the model."""
    model, plan = made(Tosses)

    def rank(mesh: Mesh) -> None:
        split = apply(copy.deepcopy(model), plan, mesh).eval()
        split(GIVEN)
        split.more = nn.Dropout()
        with pytest.raises(UsageError, match=REFUSED):
            split(GIVEN)
        split.eval()(GIVEN)
        copied: Any = copy.deepcopy(split)
        copied.up.train()
        split(GIVEN)
        with pytest.raises(UsageError, match=REFUSED):
            copied(GIVEN)

    run_ranks(2, rank)
