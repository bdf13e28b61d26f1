"""Modules that are not traced, and change objects that they are given: a cache, say."""
# pyright: reportArgumentType=false

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.trace.data_queries.errors import NeedsData
from shardwright.planner.trace.opaque.argument_objects import Objects, Watched
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks


class State:
    """Keys and values of attention, and rows of what picks."""

    def __init__(self) -> None:
        self.k: Any = None
        self.v: Any = None
        self.more: dict[str, Any] = {"rows": None, "counts": [0], "words": {"a"}}

    def rows(self, new: Tensor) -> Tensor:
        old, self.more["counts"][0] = self.more["rows"], self.more["counts"][0] + 1
        self.more["rows"] = new if old is None else torch.cat([old, new], 1)
        return self.more["rows"]


class Picks(nn.Module):
    """The mean of rows that data select, among all those that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(32, 32)

    def forward(self, x: Tensor, state: State | None) -> Tensor:
        rows = self.rows(x)
        if state is not None:
            rows = state.rows(rows)
        out = torch.zeros_like(x)
        for batch in range(x.shape[0]):
            at = (rows[batch].sum(-1) > 0).nonzero().flatten()
            if at.numel():
                out[batch] = rows[batch].index_select(0, at).mean(0)
        return out


class Decoder(nn.Module):
    """Attention with a cache, then `Picks` with the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.embed, self.picks = nn.Embedding(60, 32), Picks()
        self.qkv, self.out = nn.Linear(32, 3 * 32), nn.Linear(32, 32)

    def forward(
        self, input_ids: Tensor, use_cache: bool = False, state: State | None = None
    ) -> Any:
        x = self.embed(input_ids)
        batch, tokens, _ = x.shape
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (p.view(batch, tokens, self.heads, -1).transpose(1, 2) for p in parts)
        state = State() if use_cache and state is None else state
        if state is not None:
            if state.k is not None:
                k, v = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
            state.k, state.v = k, v
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        found = {"hidden": x + self.picks(x, state)}
        return {**found, "state": state} if use_cache else found


def ids(tokens: int) -> Tensor:
    return torch.randint(0, 60, (3, tokens), generator=torch.Generator().manual_seed(tokens))


def steps_of(model: nn.Module) -> list[Tensor]:
    first = model(ids(5), use_cache=True)
    second = model(ids(1), use_cache=True, state=first["state"])
    third = model(ids(2), use_cache=True, state=second["state"])
    assert [*third["state"].more["counts"]] == [3]
    return [first["hidden"], second["hidden"], third["hidden"]]


def planned() -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = Decoder().double().eval()
    given = {"input_ids": torch.zeros(3, 19, dtype=torch.int64), "use_cache": False}
    return model, planning.plan(model, tp=2, kwargs=given)


def test_steps_equal_those_of_the_whole_model() -> None:
    """What picks is whole, and so is what it keeps; heads are split all the same."""
    model, plan = planned()
    assert plan.opaque == {"module Picks": 1}
    assert "heads" in plan.modules[""].attributes
    known = [(call.state, call.several) for call in plan.calls if call.state]
    assert known == [({"state": "State"}, True), ({"state": "State"}, False)]
    want = steps_of(model)

    def work(mesh: Mesh) -> None:
        got = steps_of(shardwright.apply(copy.deepcopy(model), plan, mesh))
        for found, expected in zip(got, want, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)

    run_ranks(2, work)


class Takes(Picks):
    """It takes something out of the state, so calls with one cannot be traced."""

    def forward(self, x: Tensor, state: State | None) -> Tensor:
        out = super().forward(x, state)
        if state is not None:
            state.more.pop("counts")
        return out


class Reads(Decoder):
    """It reads the keys in the call that keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.picks = Takes()

    def forward(
        self, input_ids: Tensor, use_cache: bool = False, state: State | None = None
    ) -> Any:
        found = super().forward(input_ids, use_cache, state)
        if use_cache:
            found["hidden"] = found["hidden"] + found["state"].k.sum(dim=(1, 2, 3))[:, None, None]
        return found


def test_a_cache_is_refused_if_no_traced_call_had_one() -> None:
    torch.manual_seed(0)
    model = Reads().double().eval()
    given = {"input_ids": torch.zeros(3, 19, dtype=torch.int64), "use_cache": False}
    plan = planning.plan(model, tp=2, kwargs=given)
    assert [(call.values, call.state) for call in plan.calls] == [({"use_cache": False}, {})]
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    want = model(ids(5))["hidden"]

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(model), plan, mesh)
        torch.testing.assert_close(split(ids(5))["hidden"], want, rtol=0, atol=1e-9)
        with pytest.raises(shardwright.UsageError, match="use_cache of Reads is on, and was off"):
            split(ids(5), use_cache=True)

    run_ranks(2, work)


def _write(state: State) -> None:
    state.k.add_(1)


def _add(state: State) -> None:
    state.rows(state.k * 2)
    state.v = 3


@pytest.mark.parametrize(("code", "read"), [(_write, ["k"]), (_add, ["k"])])
def test_what_a_run_leaves_is_put_into_the_object(code: Any, read: list[str]) -> None:
    given, other = State(), State()
    given.k, given.v = torch.ones(2, 3), torch.zeros(2)
    other.k, other.v = torch.ones(2, 3), torch.zeros(2)
    objects = Objects([given])
    theirs = objects.copied([torch.ones(2, 3), torch.zeros(2)], torch.device("cpu"))
    with Watched(theirs) as watched:
        code(theirs.objects[0])
    assert [place.path[-1] for place in watched.touched()] == read
    for change in watched.changes():
        objects.put(change)
    code(other)
    for kept, expected in ((given.k, other.k), (given.v, other.v)):
        assert torch.equal(torch.as_tensor(kept), torch.as_tensor(expected))
    rows = given.more["rows"], other.more["rows"]
    assert rows == (None, None) or torch.equal(*rows)
    assert given.more["counts"] == other.more["counts"]


def test_what_two_objects_share_is_one_in_their_copies() -> None:
    one, other = State(), State()
    one.k = other.v = torch.ones(2)
    objects = Objects([one, other, one])
    _, said = objects.described(lambda part: type(part))  # type: ignore[misc]
    assert [place.number for place, kind in said if kind is Tensor] == [0]
    first, second, third = objects.copied([torch.zeros(2)], torch.device("cpu")).objects
    assert first is third and first.k is second.v
    assert torch.equal(first.k, torch.zeros(2))


REFUSED: dict[str, Callable[[State], Any]] = {
    "takes 'rows' out": lambda state: state.more.pop("rows"),
    "puts more than tensors": lambda state: state.more.update(counts=[1]),
    "changes a set": lambda state: state.more["words"].add("b"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_may_not_do(words: str) -> None:
    objects = Objects([State()])
    watched = Watched(objects)
    REFUSED[words](objects.objects[0])
    with pytest.raises(NeedsData, match=words):
        watched.changes()
