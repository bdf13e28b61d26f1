"""Lists, dicts and objects that a model keeps, and that are changed in place after it was split."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import UsageError
from tests import planning
from tests.runtime.test_settings import WIDTH, on_ranks


@dataclass
class Inner:
    over: bool = False


@dataclass
class Sizes:
    power: int = 2
    rate: float = 0.1
    inner: Inner = field(default_factory=Inner)


class Mixed(nn.Module):
    """What it computes over the features hangs on what it keeps in lists and objects."""

    steps = ["relu"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.args = Sizes()
        self.flags = {"soft": False, "names": ["a"]}
        self.windows = [[1, 2], [3]]
        self.space = SimpleNamespace(scale=1.0)
        self.seen: list[Any] = []
        self.counts = {"calls": 0}
        self.words = ["w"] * 2000

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] = max(self.counts["calls"], 1)
        self.seen[:] = [x * 1, len(self.words)]
        h = self.up(x) * self.space.scale
        if self.flags["soft"] or len(self.flags["names"]) > 1 or self.args.inner.over:
            h = h.softmax(-1)
        if "cumsum" in self.steps or len(self.windows[0]) > 2:
            h = h.cumsum(-1)
        return self.down(h.pow(self.args.power))


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "args.power": lambda m: setattr(m.args, "power", 3),
    "args.inner.over": lambda m: setattr(m.args.inner, "over", True),
    "flags": lambda m: m.flags.update(soft=True),
    "flags ": lambda m: m.flags["names"].append("b"),
    "windows": lambda m: m.windows[0].append(3),
    "space.scale": lambda m: setattr(m.space, "scale", torch.ones(3)),
}


@pytest.fixture(scope="module")
def mixed() -> tuple[Mixed, Tensor, Any]:
    torch.manual_seed(0)
    model, x = Mixed().double().eval(), torch.randn(2, 5, WIDTH).double()
    plan = planning.plan(copy.deepcopy(model), tp=2, args=(x,))
    assert plan.modules["up"].parameters
    return model, x, plan


def test_what_changes_in_place_is_refused(mixed: Any) -> None:
    model, x, plan = mixed
    want = copy.deepcopy(model)(x)

    def check(local: Any) -> None:
        for path, put in IN_PLACE.items():
            one = copy.deepcopy(local)
            torch.testing.assert_close(one(x), want, rtol=0, atol=1e-9)
            put(one)
            for _ in range(2):
                with pytest.raises(UsageError, match=f"'{path.strip()}' is .* when the model was"):
                    one(x)
        for _ in range(3):  # what its own code changes, and what no code of it asks for
            local.args.rate, local.words[0] = 0.5, "v"
            torch.testing.assert_close(local(x), want, rtol=0, atol=1e-9)
        local.seen.clear()
        assert local.counts == {"calls": 1}
        local.counts["calls"] = 0
        local(x)

    on_ranks(model, plan, check)


def test_a_list_of_a_class_that_changes_in_place_is_refused(mixed: Any) -> None:
    model, x, plan = mixed
    try:

        def check(local: Any) -> None:
            local(x)
            dist.barrier()
            Mixed.steps[:] = ["relu", "cumsum"]
            with pytest.raises(UsageError, match="'steps' of the class 'Mixed' is "):
                local(x)

        on_ranks(model, plan, check)
    finally:
        Mixed.steps[:] = ["relu"]
