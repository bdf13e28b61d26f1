"""Modules that branch on data stand for themselves; what is around them is split all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.prove.prover import Prover
from shardwright.planner.trace.opaque import random_inputs
from shardwright.runtime.api import apply
from tests.planner.equal import Inputs, assert_equal, features
from tests.planner.equal import planned as planned_for
from tests.planner.mlps import WIDTH, Mlp
from tests.planning import plan
from tests.ranks import run_ranks

EXPERTS = 3


class Loop(nn.Module):
    """Experts in a loop over those that are chosen at all, in an order that needs data."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        each = nn.functional.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero().flatten().tolist()
        for i in sorted(each):  # needs the list itself, so this is not traced as a loop over rows
            at = torch.where(chosen == i)
            out = out.index_put(at, self.each[i](x[at]))
        return out


class Passes(Loop):
    """The same experts in a loop that is traced; keeps what it computed."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in nn.functional.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero().flatten().tolist():
            at = torch.where(chosen == i)
            out = out.index_put(at, self.each[i](x[at]))
        self.last = out
        return self.last * 2


class PassesOfChanged(Passes):
    """Changes what it is given."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return super().forward(x, chosen.clamp_(max=EXPERTS - 2))


class Block(nn.Module):
    """Chosen experts, then an MLP that can be split."""

    def __init__(self, experts: Callable[[], nn.Module] = Loop) -> None:
        super().__init__()
        self.router, self.experts, self.mlp = nn.Linear(WIDTH, EXPERTS), experts(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        x = x + scores[..., None] * self.experts(x, chosen.clone())
        return x + self.mlp(x)


class Model(nn.Module):
    """Blocks in a row."""

    def __init__(self, block: Callable[[], nn.Module], blocks: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Lengths(nn.Module):
    """How often each expert is chosen, as numbers."""

    def forward(self, chosen: Tensor) -> list[int]:
        return chosen.flatten().bincount(minlength=EXPERTS).tolist()


class Sorted(Loop):
    """Rows of one expert in a row, cut by numbers that another module gives out."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = Lengths()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        parts = x.flatten(0, 1)[order].split(self.lengths(chosen))
        done = torch.cat([each(part) for each, part in zip(self.each, parts, strict=True)])
        return torch.zeros_like(done).index_copy(0, order, done).view(x.shape)


class Rows(nn.Module):
    """As many rows as the data says."""

    def forward(self, x: Tensor) -> Tensor:
        return x[: int((x.sum((1, 2)) > 0).sum())]


class Count(nn.Module):
    """What `Rows` gives out meets a parameter again."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.up = Rows(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return x + self.up(self.rows(x)).sum(0)


class Changes(Loop):
    """Changes what it is given if the data is such."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        chosen.clamp_(max=EXPERTS - 2)
        return super().forward(x, chosen)


class HandsOn(Loop):
    """Gives out what it was given."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return x if float(chosen.max().item()) >= 0 else -x


class Contradicts(Loop):
    """Does not run where nothing is as the number says that it is given."""

    def forward(self, x: Tensor, chosen: Tensor, some: bool = True) -> Tensor:
        assert not some or bool((chosen > 0).any())
        return super().forward(x, chosen)


class Keeps(Loop):
    """Keeps what it computed."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        self.last = super().forward(x, chosen)
        return self.last * 2


class Numbers(Loop):
    """Computes with a number that it is given."""

    def forward(self, x: Tensor, chosen: Tensor, heads: int = 1) -> Tensor:
        return super().forward(x, chosen) / heads


class Heads(Block):
    """Cuts into heads by a number that the experts are given as well."""

    def __init__(self) -> None:
        super().__init__(Numbers)
        self.num_heads = 4
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).max(-1).indices
        x = x + self.experts(x, chosen, self.num_heads)
        y = self.up(x).view(*x.shape[:-1], self.num_heads, -1)
        return self.down(y.relu().flatten(-2))


class Borrows(Block):
    """Calls a part of its experts, too."""

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.experts.each  # type: ignore[union-attr]
        return super().forward(x) + first[0](x).relu()


def planned(model: nn.Module, inputs: Inputs) -> Plan:
    """For two ranks; what runs on data must be of the dtype of the inputs."""
    return planned_for(model.double(), inputs, 2)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "loop": (Block, {"module Loop": 1}),
    "some data will not do": (lambda: Block(Contradicts), {"module Contradicts": 1}),
    "numbers come out": (lambda: Block(Sorted), {}),
    "rows come out": (lambda: Block(Count), {"module Count": 1}),
    "an attribute goes in": (Heads, {"module Numbers": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole_model(name: str) -> None:
    """Outputs and gradients; the MLP is split, and what is not is listed."""
    make, listed = CASES[name]
    model = Model(make)
    plan = planned(model, features(WIDTH))
    assert {k: n for k, n in plan.opaque.items() if k.startswith("module")} == listed
    assert plan.predicted.parameter_bytes[0] < plan.predicted.unsharded_bytes
    assert_equal(model, features(WIDTH), plan)


@pytest.mark.parametrize("experts", [Changes, HandsOn])
def test_what_does_more_than_compute_is_taken_with_what_is_around(experts: type[Loop]) -> None:
    model = nn.Sequential(Model(lambda: Block(experts)), Mlp())
    plan = planned(model, features(WIDTH))
    assert plan.opaque == {"module Block": 1}
    assert_equal(model, features(WIDTH), plan)


def test_what_keeps_something_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot trace Model: .*keeps something"):
        planned(Model(lambda: Block(Keeps)), features(WIDTH))


@pytest.mark.parametrize("experts", [Passes, PassesOfChanged])
def test_what_is_traced_may_keep_and_change(experts: type[Passes]) -> None:
    """Every rank keeps what the whole module keeps."""
    model = Model(lambda: Block(experts), blocks=2)
    plan = planned(model, features(WIDTH))
    assert plan.opaque == {}
    assert_equal(model, features(WIDTH), plan)
    (x,) = features(WIDTH)(2, 7)

    def kept(local: nn.Module) -> list[Tensor]:
        local(x)
        return [m.last.detach() for m in local.modules() if isinstance(m, Passes)]

    want = kept(copy.deepcopy(model))
    for got in run_ranks(2, lambda mesh: kept(apply(copy.deepcopy(model), plan, mesh))):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_a_part_that_is_called_from_outside_is_not_changed() -> None:
    model = nn.Sequential(Model(Borrows), Mlp())
    plan = planned(model, features(WIDTH))
    assert plan.opaque == {"module Borrows": 1}
    assert_equal(model, features(WIDTH), plan)


def test_every_block_of_a_folded_stack() -> None:
    model = Model(Block, blocks=5)
    plan = planned(model, features(WIDTH))
    assert plan.opaque["module Loop"] == 5
    assert_equal(model, features(WIDTH), plan)


def test_weights_too_large_to_be_made_up_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> Plan:
        torch.manual_seed(0)
        return planned(Model(Block), features(WIDTH))

    before = plan()
    monkeypatch.setattr(random_inputs, "LARGE", 1)
    assert plan() == before


def test_nothing_of_a_user_is_changed() -> None:
    """Neither the module nor the state of random numbers."""
    model = Model(Block).double()
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    planned(model, lambda b, t: (torch.zeros(b, t, WIDTH, dtype=torch.float64),))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert "forward" not in model.layers[0].get_submodule("experts").__dict__


class RowsAndMlp(Rows):
    """With a float that it reads, it then does one thing or another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(super().forward(x))
        most = sorted(x.flatten().tolist())[-1]
        return self.down(h.softmax(-1) if most > 9 else h.relu())


def test_a_model_that_depends_on_data_as_a_whole() -> None:
    """It is traced with the floats that the user gave, if there are any."""
    model = RowsAndMlp().double()
    x = torch.randn(3, 19, WIDTH).double()
    with pytest.raises(ModelError, match="cannot trace RowsAndMlp"):
        plan(model, 2, args=(x.to("meta"),))
    found = plan(model, 2, args=(x,))
    assert "values like those that it was given" in found.solver.note
    for scale in (1, 0.1, 9):
        x = torch.randn(4, 7, WIDTH).double().abs() * scale
        want = model(x)
        for got in run_ranks(2, lambda m, x=x: apply(copy.deepcopy(model), found, m)(x)):
            torch.testing.assert_close(got, want)


def test_a_plan_of_such_a_model_is_proven_again() -> None:
    model = Model(Block).double()
    plan = planned(model, features(WIDTH))
    assert Prover(model, features(WIDTH)(3, 19)).prove(plan).plan == plan


class Windows(nn.Module):
    """Runs only if the numbers that it reads, given or in a buffer, are large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.size = nn.Linear(WIDTH, WIDTH), nn.Buffer(torch.tensor(5), persistent=False)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        if len(x[: sorted(counts.tolist())[0]]) < 2 or int(self.size) < 4:
            raise ValueError("too few")
        padded = nn.functional.pad(self.up(x), (0, 0, 0, int(self.size) * 2))
        return padded[:, : x.shape[1]]


class Windowed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.windows, self.mlp = Windows(), Mlp()

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.mlp(self.windows(x, counts))


def test_given_numbers_are_not_made_up() -> None:
    """What such a module gives out is found with the integers that the user gave, and its own."""
    model = Windowed().double()
    given = torch.randn(3, 19, WIDTH).double(), torch.tensor([3, 2, 4])
    found = plan(model, 2, args=given)
    assert {*found.modules} >= {"mlp.up", "mlp.down"}
    x, counts = torch.randn(4, 7, WIDTH).double(), torch.tensor([4, 3])
    want = model(x, counts)
    for got in run_ranks(2, lambda m: apply(copy.deepcopy(model), found, m)(x, counts)):
        torch.testing.assert_close(got, want)


def test_numbers_of_checkpoints_are_made_up() -> None:
    """A buffer that is saved may have another value in the checkpoint that is loaded."""
    model = Windowed().double()
    model.windows._non_persistent_buffers_set.clear()
    with pytest.raises(ModelError, match="on made-up data it fails: ValueError: too few"):
        plan(model, 2, args=(torch.randn(3, 19, WIDTH), torch.tensor([3, 2, 4])))


def test_made_up_data_is_said_to_be() -> None:
    """The model itself runs: nothing else is claimed."""
    with pytest.raises(ModelError, match="on made-up data it fails: ValueError: too few"):
        plan(Windowed(), 2, args=(torch.randn(3, 19, WIDTH), torch.tensor([3, 2, 4]).to("meta")))
