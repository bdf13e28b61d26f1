"""Code that reads numbers off data: what it may do with them, and what is left whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.trace.data_queries.model_code import answer_that_goes_on
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import assert_equal, features, planned
from tests.planner.mlps import WIDTH, Mlp
from tests.planning import plan
from tests.ranks import run_ranks

EXPERTS, HIDDEN = 4, 32


class Counted(nn.Module):
    """Experts that each take as many rows as the data says, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort()
        counts = F.one_hot(chosen, EXPERTS).sum(0).tolist()
        parts = rows[order].split(counts)
        done = [
            F.linear(F.linear(p, u).relu(), d)
            for p, u, d in zip(parts, self.up, self.down, strict=True)
        ]
        out = torch.zeros_like(rows).index_add(0, order, torch.cat(done) * weights[order, None])
        return out.view(x.shape)


class Around(nn.Module):
    """A root with an MLP, and code that asks something before it."""

    def __init__(self, inner: Callable[[], nn.Module] = Mlp) -> None:
        super().__init__()
        self.inner = inner()

    def ask(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        self.ask(x)
        return self.inner(x)


class Asserts(Around):
    def ask(self, x: Tensor) -> None:
        assert x.abs().max().item() <= 1e9, "too large"


class AssertsATensor(Around):
    def ask(self, x: Tensor) -> None:
        assert (x == x).all()


class Raises(Around):
    def ask(self, x: Tensor) -> None:
        if not (x == x).all():
            raise ValueError("not a number")


class Inside(Mlp):
    """Asks what each rank has a part of."""

    def between(self, y: Tensor) -> Tensor:
        y = F.relu(y)
        assert y.max().item() <= 1e9
        return y


class Branches(Mlp):
    """Goes on either way."""

    bound = 0.0

    def between(self, y: Tensor) -> Tensor:
        return y * 2 if y.max().item() > self.bound else y


class Computes(Mlp):
    """Computes with a number."""

    def between(self, y: Tensor) -> Tensor:
        return y / (1 + y.abs().max().item())


class Catches(Mlp):
    """Goes on where an assert fails."""

    bound = 0.0

    def between(self, y: Tensor) -> Tensor:
        try:
            assert y.max().item() < self.bound
        except AssertionError:
            return y * 2
        return y


class Optional(Mlp):
    """Leaves a mask out where it has no effect, and asks again later."""

    bound = 0.0

    def between(self, y: Tensor) -> Tensor:
        mask = y > self.bound
        mask = None if not mask.any() else mask
        y = y if mask is None else y.masked_fill(mask, 0.0)
        some = (y > self.bound - 1).any().item()
        return y.relu() if some else y + y if some is False else y


class Remembers(Mlp):
    """Asks the first time only: what it does then is not what it does when it is run again."""

    first = True

    def between(self, y: Tensor) -> Tensor:
        if self.first:
            self.first = False
            return y * 2 if y.max().item() > 0.5 else y
        return y.relu()


class Refuses(Mlp):
    """Raises at what it has read before."""

    def between(self, y: Tensor) -> Tensor:
        wrong = (y != y).any().item()
        if wrong:
            raise ValueError("not a number")
        return y.relu()


class Often(Mlp):
    """Asks until the answer is another."""

    def between(self, y: Tensor) -> Tensor:
        while y.max().item() > 0.5:
            y = y / 2
        return y


class Scaled(nn.Module):
    """Changes in place what a module gave, so autograd must own that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(WIDTH), Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x *= 0.5
        x = self.norm(x + self.one(x))
        x *= 0.5
        return x + self.two(x)


def split(plan: Plan) -> set[str]:
    """Parameters that are split, by the end of their name."""
    return {
        p if name == "inner" else f"{name.rpartition('.')[2]}.{p}"
        for name, module in plan.modules.items()
        for p, at in module.parameters.items()
        if "@" in at.placement
    }


@pytest.mark.parametrize("make", [Asserts, AssertsATensor, Raises])
def test_a_question_with_one_way_on_is_no_branch(make: Callable[[], nn.Module]) -> None:
    model = make().double()
    plan = planned(model, features(WIDTH), 2)
    assert split(plan) >= {"up.weight", "down.weight"}
    assert not plan.opaque
    assert_equal(model, features(WIDTH), plan)


def test_rows_cut_by_counts() -> None:
    """Both matrices of each expert are split, whoever chose how many rows."""
    model = Around(Counted).double()
    plan = planned(model, features(WIDTH), 2)
    assert split(plan) >= {"up", "down"}
    assert not any(name.startswith("module") for name in plan.opaque)
    assert_equal(model, features(WIDTH), plan)


@pytest.mark.parametrize("make", [Inside, Refuses])
def test_what_is_read_is_whole(make: Callable[[], nn.Module]) -> None:
    """No rank reads a part of it: both matrices around cannot be split along what is between."""
    model = Around(make).double()
    plan = planned(model, features(WIDTH), 2)
    assert not plan.opaque
    up = plan.modules.get("inner.up")
    assert up is None or up.outputs or "@" not in up.parameters["weight"].placement
    assert_equal(model, features(WIDTH), plan)


@pytest.mark.parametrize("make", [Branches, Catches, Optional])
def test_code_that_goes_on_either_way_is_run_both_ways(make: Callable[[], Mlp]) -> None:
    """What is asked about is replicated, so that all ranks go the same way, whichever it is."""
    inner = make()
    model = Around(lambda: nn.Sequential(inner, Mlp())).double()
    plan = planned(model, features(WIDTH), 2)
    assert not plan.opaque
    assert split(plan) >= {"up.weight", "down.weight"}
    for bound in (-1e9, 1e9):
        setattr(inner, "bound", bound)  # noqa: B010
        assert_equal(model, features(WIDTH), plan)


@pytest.mark.parametrize("make", [Computes, Often, Remembers])
def test_anything_else_depends_on_data(make: Callable[[], nn.Module]) -> None:
    """The module runs whole, and beside it all is split."""
    model = Around(lambda: nn.Sequential(make(), Mlp())).double()
    plan = planned(model, features(WIDTH), 2)
    assert plan.opaque == {f"module {make.__name__}": 1}  # type: ignore[attr-defined]
    assert_equal(model, features(WIDTH), plan)


def test_what_is_changed_in_place_is_no_view_of_another_module() -> None:
    model = Around(Scaled).double()
    plan = planned(model, features(WIDTH), 2)
    assert split(plan) >= {"up.weight", "down.weight"}
    assert_equal(model, features(WIDTH), plan)


TESTS = {
    "assert a": True,
    "assert not a": False,
    "assert a <= b, c": True,
    "assert (a.max()\n    .item() <= b)": True,
    "if a > b:\n    raise c": False,
    "if not a:\n    raise c": True,
    "if a:\n    raise c\nelse:\n    b()": None,
    "if a:\n    b()\n    raise c": None,
    "if a:\n    b()": None,
    "assert a or b": None,
    "assert all(x > 1 for x in a)": None,
    "assert bool(a) == b": None,
    "assert a < b < c": None,
    "assert a in b": None,
    "try:\n    assert a\nexcept c:\n    b()": None,
    "with suppress(a):\n    assert b": None,
    "d = a > b": None,
}


@pytest.mark.parametrize("code", TESTS)
def test_which_way_code_goes_on(code: str, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(code + "\n")
    lines = range(1, code.count("\n") + 2)
    want = TESTS[code]
    assert {
        answer_that_goes_on(str(file), n)
        for n in lines
        if answer_that_goes_on(str(file), n) is not None
    } == ({want} - {None})


class CountsLarge(nn.Module):
    """Branches on a number that a floating-point input says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        count = (x[:, 0, 0] > 0).sum().item()
        return self.down(self.up(x)) if count > 1 else self.down(self.up(x[:, :1])) * count


def test_values_of_floats_answer_branches_last() -> None:
    """Other data takes the other branch. What the code has there is whole, so it is right, too."""
    model = CountsLarge().double()
    with pytest.raises(ModelError, match="it reads numbers off data|a number that depends on data"):
        plan(model, 2, args=(torch.ones(3, 19, 16, device="meta").double(),))
    found = plan(model, 2, args=(torch.ones(3, 19, 16).double(),))
    assert "values like those that it was given" in found.solver.note
    for positive in (0, 1, 3):
        x = torch.randn(3, 7, 16).double()
        x[:, 0, 0] = torch.arange(3) - (3 - positive) + 0.5
        model.zero_grad()
        want = model(x)
        want.square().sum().backward()
        wanted = {n: p.grad for n, p in model.named_parameters()}

        def rank(mesh: Mesh, x: Tensor = x) -> tuple[Tensor, dict[str, Tensor]]:
            split = apply(copy.deepcopy(model), found, mesh)
            split.zero_grad()
            out = split(x)
            out.square().sum().backward()
            grads = {n: p.grad for n, p in split.named_parameters() if p.grad is not None}
            return out, full_tensors(split, grads)

        for got, grads in run_ranks(2, rank):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
            torch.testing.assert_close(grads, wanted, rtol=0, atol=1e-9)


class ByGrid(nn.Module):
    """Adds rows of a table to patches, as many for each image as its grid says."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.table = nn.Linear(8, 32), nn.Linear(32, 8), nn.Embedding(16, 8)

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        grid = grid[:, [1, 0]]
        rows = torch.repeat_interleave(grid[:, 0], grid[:, 1])
        return self.down(self.up(x + self.table(rows)).relu())


class OfGrids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = ByGrid(), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(x, grid))


def test_columns_that_a_list_names_have_known_values() -> None:
    """Without these the rows cannot be counted, and what counts them is left whole."""
    module, grid = OfGrids().double(), torch.tensor([[3, 2], [5, 1], [4, 2]])

    def patches(batch: int, sequence: int) -> tuple[Tensor, Tensor]:
        return torch.randn(int(grid[:, 0].sum()), 8, dtype=torch.float64), grid

    found = planned(module, patches, 2)
    assert not found.opaque
    assert found.predicted.parameter_bytes[0] < 0.6 * found.predicted.unsharded_bytes
    assert_equal(module, patches, found)
