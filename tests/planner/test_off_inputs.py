"""Sizes that code computes from what it is given become local at the calls that take them."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.prove.check import check
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests.planner.equal import TRACED, assert_equal, features, planned
from tests.planner.off_inputs import MODELS, Attention, CausalAttention, NanoGPT, ids
from tests.ranks import run_ranks


def collectives(plan: Plan) -> list[tuple[str, str, int, int]]:
    return [(c.phase, c.kind, c.count, c.bytes) for c in plan.predicted.collectives]


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_split_as_with_attributes_and_equal(name: str, tp: int) -> None:
    model, twin, inputs = MODELS[name]
    plan = planned(model().double(), inputs, tp)
    like = planned(model(twin).double(), inputs, tp)
    assert any(module.sizes for module in plan.modules.values())
    assert collectives(plan) == collectives(like)
    assert plan.predicted.parameter_bytes == like.predicted.parameter_bytes
    assert_equal(model().train(tp == 2), inputs, plan)


class Helped(nn.Module):
    """A function of no module takes the sizes: its code is not this module's to change."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 4, nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (split_heads(y, b, t, self.heads, c) for y in self.qkv(x).chunk(3, dim=-1))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))


def split_heads(x: Tensor, b: int, t: int, heads: int, width: int) -> Tensor:
    return x.view(b, t, heads, width // heads).transpose(1, 2)


class InLambda(Helped):
    """As of lucidrains: a function within the method, heads and batch in one size, torch's name."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        h = self.heads
        q, k, v = map(
            lambda y: y.view(b, t, h, c // h).transpose(1, 2).reshape(b * h, t, c // h),
            self.qkv(x).split(c, dim=-1),
        )
        y = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).view(b, h, t, c // h)
        return self.out(torch.reshape(y.transpose(1, 2), (b, t, c)))


class Shared(Helped):
    """One call for what is split by heads and for what is not."""

    def heads_of(self, x: Tensor, c: int) -> Tensor:
        return x.view(*x.shape[:2], self.heads, c // self.heads)

    def forward(self, x: Tensor) -> Tensor:
        c = x.shape[-1]
        q, k, v = (self.heads_of(y, c).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.heads_of(x, c).softmax(2).flatten(2)
        return x + self.out(y.transpose(1, 2).flatten(2))


class GivesSizes(nn.Module):
    """Users see an integer: the number of features of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.up, self.down = 96, nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h.relu()), {"sizes": (h.shape[-1], h.view(-1, self.width).shape)}


class Notes:
    """What code notes of its sizes."""

    def __init__(self, x: Tensor) -> None:
        self.width, self.shapes = x.shape[-1], [x.shape]


class GivesNotes(GivesSizes):
    """In an object of a class of its own."""

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h.relu()), Notes(h)


class KeepsSizes(GivesSizes):
    """In attributes: in the place of what was there, in a list, in a table and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.like, self.listed, self.notes = None, 96, [0], Notes(torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        self.seen, self.like, self.listed[0] = h.shape, h.shape[-1], h.shape[-1] // 2
        self.notes.width = h.shape[-1] + 1
        return self.down(h.relu())

    def kept(self) -> Any:
        return self.seen, self.like, self.listed, self.notes.width


@pytest.mark.parametrize("tp", [2, 3])
def test_numbers_in_objects_and_attributes_are_those_of_the_whole(tp: int) -> None:
    torch.manual_seed(0)
    (x,) = features(64)(2, 7)
    gives, keeps = GivesNotes().double(), KeepsSizes().double()
    plans = [planned(copy.deepcopy(m), features(64), tp) for m in (gives, keeps)]
    assert all({*plan.modules} == {"up", "down"} for plan in plans)

    def found(gives: Any, keeps: Any) -> Any:
        keeps(x)
        return vars(gives(x)[1]), keeps.kept()

    def rank(mesh: Mesh) -> Any:
        made = zip((gives, keeps), plans, strict=True)
        return found(*(apply(copy.deepcopy(m), plan, mesh) for m, plan in made))

    want = found(copy.deepcopy(gives), copy.deepcopy(keeps))
    assert run_ranks(tp, rank) == [want] * tp


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("cls", [Helped, InLambda, Shared, GivesSizes, lambda: Attention(64, 4)])
def test_modules_are_equal(cls: Any, tp: int) -> None:
    plan = planned(cls().double(), features(64), tp)
    assert_equal(cls(), features(64), plan)


def test_sizes_of_batch_and_heads_in_one() -> None:
    plan = planned(InLambda().double(), features(64), 2)
    assert plan.modules[""].sizes == {
        "forward.split.0": "4@tp*16",
        "forward.view.0": "?, ?, 4@tp",
        "forward.reshape.0": "?*4@tp",
        "forward.view.1": "?, 4@tp",
        "forward.reshape.1": "?, ?, 4@tp*16",
    }


def test_compiles_in_one_graph() -> None:
    model = CausalAttention(64, 4).double()
    plan = planned(copy.deepcopy(model), features(64), 2)
    (x,) = features(64)(2, 7)
    want = model(x)

    def rank(mesh: Mesh) -> None:
        mine = apply(copy.deepcopy(model), plan, mesh)
        torch._dynamo.reset()
        fast = torch.compile(mine, fullgraph=True, backend="aot_eager")
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        got = fast(a)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.sum(), a), torch.autograd.grad(mine(b).sum(), b)
        )

    run_ranks(2, rank)


def test_check_proves_them_and_notices_others() -> None:
    model, example = CausalAttention(64, 4).double(), features(64)(*TRACED)
    plan = planned(model, features(64), 2)
    check(plan, model, args=example)
    for call, text in {"forward.view.3": "?, ?, 64@tp", "forward.view.0": "?, 4@tp"}.items():
        data = json.loads(plan.to_json())
        assert data["modules"][""]["sizes"].pop(call)
        with pytest.raises(PlanError, match=f"sizes.{call} is missing"):
            check(Plan.from_json(json.dumps(data)).sealed(), model, args=example)
        data["modules"][""]["sizes"][call] = text
        with pytest.raises(PlanError, match=f"sizes.{call} is '{text[0]}"):
            check(Plan.from_json(json.dumps(data)).sealed(), model, args=example)


class Written(CausalAttention):
    """Of the same shapes, and other code."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.size()
        q, k, v = (y.view(b, t, 4, 16).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        return self.c_proj((q @ k.mT @ v).transpose(1, 2).flatten(2))


def test_other_code_and_other_sizes_raise() -> None:
    model, written = CausalAttention(64, 4).double(), Written(64, 4).double()
    plan = planned(model, features(64), 2)
    other = plan.model_copy(
        update={"model": plan.model.model_copy(update={"architecture": "Written"})}
    ).sealed()

    def refused(mesh: Mesh) -> None:
        with pytest.raises(PlanError, match=r"Written.forward is not .* plan again"):
            apply(copy.deepcopy(written), other, mesh)
        mine = apply(copy.deepcopy(model), plan, mesh)
        mine.n_head = 8  # type: ignore[assignment]
        with pytest.raises(UsageError, match="'n_head' is 8, and was 4 when the model was split"):
            mine(*features(64)(2, 7))
        mine = apply(copy.deepcopy(model), plan, mesh)
        vars(mine)["n_head"] = 8  # nobody notices that, but what its code asks for
        with pytest.raises(PlanError, match=r"forward.view.* should have 4 elements here, not 8"):
            mine(*features(64)(2, 7))

    run_ranks(2, refused)


def test_only_models_that_need_them_have_the_key() -> None:
    _, twin, inputs = MODELS["nanoGPT"]
    assert '"sizes"' not in planned(NanoGPT(twin), inputs, 2).to_json()
    text = planned(NanoGPT(), ids, 2).to_json()
    assert '"sizes"' in text and Plan.from_json(text).unedited().to_json() == text
