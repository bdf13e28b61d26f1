"""Plain values that a model gives out, or leaves in attributes, and numbers that it computes with.

Code makes them of sizes, of which a rank has parts: they are those of the whole all the same.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.runtime.api import apply
from tests.planner.equal import RUN, TRACED, assert_equal, features, planned
from tests.ranks import run_ranks


class Mlp(nn.Module):
    """Up, something of what is split, and down."""

    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.of = nn.Linear(16, 64), nn.Linear(64, 16), of
        self.table: dict[str, Any] = {"seen": None}

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


class Gives(Mlp):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h), self.of(h)


class Keeps(Mlp):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        self.table["seen"] = self.of(h)
        return self.down(h), None


class Computes(Mlp):
    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h * self.of(h))


SEEN: dict[str, Callable[[Tensor], Any]] = {
    "comparison": lambda h: h.shape[-1] > 40,
    "text": lambda h: f"{h.shape[-1]} features",
    "number of elements": lambda h: h.numel(),
    "stride": lambda h: h.stride(0),
    "bytes": lambda h: h.nbytes > 600 * h.element_size(),
    "length": lambda h: len(h[0, 0]),
    "rest": lambda h: [h.shape[-1] % 40],
    "root": lambda h: math.isqrt(h.shape[-1]),
    "no number": lambda h: (float("nan"), h.numel()),
    "list": lambda h: ["x"] * h.shape[-1],
    "key": lambda h: {h.shape[-1] % 40: "x"},
    "slice": lambda h: slice(0, h.shape[-1]),
    "range": lambda h: range(h.shape[-1]),
    "positions": lambda h: torch.arange(h.shape[-1]),
    "which": lambda h: h.detach() > 0,
}


@pytest.mark.parametrize("what", SEEN)
@pytest.mark.parametrize("kind", [Gives, Keeps])
def test_what_users_see_is_of_the_whole(kind: type[Mlp], what: str) -> None:
    torch.manual_seed(0)
    model = kind(SEEN[what]).double()
    plan = planned(copy.deepcopy(model), features(16), 2)
    (x,) = features(16)(2, 7)

    def seen(model: nn.Module) -> Any:
        out = model(x)[1]
        return out if kind is Gives else model.table["seen"]  # type: ignore[index]

    want = seen(copy.deepcopy(model))
    for found in run_ranks(2, lambda mesh: seen(apply(copy.deepcopy(model), plan, mesh))):
        assert torch.equal(found, want) if isinstance(want, Tensor) else repr(found) == repr(want)


def test_what_is_no_number_is_alike() -> None:
    plan = planned(Gives(lambda h: float("nan")).double(), features(16), 2)
    assert {*plan.modules} == {"up", "down"}
    assert [c.kind for c in plan.predicted.collectives if c.phase == "forward"] == ["all_reduce"]


def put(h: Tensor) -> Tensor:
    out = h.new_zeros(1)
    out[:] = h.shape[-1]
    return out


RANGE = torch.arange(128.0)

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda h: torch.full((1,), h.shape[-1]),
    "new_full": lambda h: h.new_full((1,), fill_value=h.shape[-1]),
    "put": put,
    "arange": lambda h: torch.arange(h.shape[-1]).sum(),
    "arange of many": lambda h: torch.arange(1, 2 + h.numel() // h.shape[0]).prod(0).sum() % 7 + 1,
    "triu": lambda h: torch.ones(4, 4).triu(h.shape[-1] - 63).sum(),
    "at a place": lambda h: RANGE[h.shape[-1]],
    "narrow": lambda h: RANGE.narrow(0, 0, h.shape[-1]).sum(),
    "chunk": lambda h: RANGE.chunk(h.shape[-1] // 16)[0].sum(),
    "topk": lambda h: RANGE.topk(h.shape[-1])[0].sum(),
    "repeat": lambda h: torch.ones(2).repeat(h.shape[-1]).sum(),
    "repeat part": lambda h: h.mean(-1).repeat(h.shape[-1], 1).sum(0, keepdim=True).mT[:1],
    "tile": lambda h: torch.ones(2).tile(h.shape[-1]).sum(),
    "repeat_interleave": lambda h: torch.ones(2).repeat_interleave(h.shape[-1], 0).sum(),
    "pad": lambda h: F.pad(torch.ones(2), (0, h.shape[-1]), value=1.0).sum(),
    "roll": lambda h: torch.arange(8.0).roll(h.shape[-1] // 21)[0],
}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_that_functions_compute_with_are_of_the_whole(what: str, tp: int) -> None:
    model = Computes(NUMBERS[what]).double()
    plan = planned(copy.deepcopy(model), features(16), tp)
    assert_equal(model, features(16), plan, collectives=False)


ASKED: dict[str, Callable[[Tensor], bool]] = {
    "elements": lambda h: h.numel() > 600,
    "product": lambda h: math.prod(h.shape) > 600,
    "plain": lambda h: int(h.numel()) > 600,
    "half": lambda h: h.numel() * 0.5 > 300,
    "bytes": lambda h: h.nbytes > 600 * h.element_size(),
    "stride": lambda h: h.stride(0) >= 300,
    "rest": lambda h: h.shape[1] * h.shape[2] % 19 == 15,
    "text": lambda h: "9" in f"{h.numel()}",
    "merged": lambda h: h.flatten(1).shape[-1] > 280,
    "length": lambda h: len(h.flatten(1)[0]) > 280,
    "key": lambda h: h.numel() in {896},
    "longer": lambda h: h.shape[1] > h.shape[2] // 8,
}
"""Of the whole the same as of half in the trace, and not in a call."""


@pytest.mark.parametrize("what", ASKED)
def test_questions_about_sizes_of_run_time_and_of_the_model_are_of_the_whole(what: str) -> None:
    ask = ASKED[what]
    answers = [[ask(torch.empty(*sizes, n)) for n in (32, 64)] for sizes in (TRACED, RUN)]
    assert answers[0][0] == answers[0][1] and answers[1][0] != answers[1][1]
    model = Computes(lambda h: torch.tensor(2.0 if ask(h) else 1.0)).double()
    plan = planned(copy.deepcopy(model), features(16), 2)
    assert_equal(model, features(16), plan, collectives=False)


NEW: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda h: h.new_full((h.shape[-1],), 2.0) + torch.zeros(h.shape),
    "repeat": lambda h: torch.full((1, 1, 1), 2.0).repeat(1, 1, h.shape[-1]),
    "repeat pairs": lambda h: torch.ones(2).repeat(h.shape[-1] // 2),
    "tile pairs": lambda h: torch.arange(2.0).tile((h.shape[-1] // 2,)),
    "repeat_interleave": lambda h: torch.full((1, 1), 2.0).repeat_interleave(
        n := h.shape[-1], dim=1, output_size=n
    ),
    "repeat for nobody": lambda h: (torch.ones(2).repeat(h.shape[-1]), h)[1],
}


@pytest.mark.parametrize("what", NEW)
def test_sizes_of_new_tensors_still_become_local(what: str) -> None:
    model = Computes(NEW[what]).double()
    plan = planned(copy.deepcopy(model), features(16), 2)
    assert plan.predicted.parameter_bytes[0] < 0.55 * plan.predicted.unsharded_bytes
    assert [c.kind for c in plan.predicted.collectives if c.phase == "forward"] == ["all_reduce"]
    assert_equal(model, features(16), plan)
