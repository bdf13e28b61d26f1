"""Submodules that change lists, dicts and objects that they are given, or attributes of tensors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from tests import planning
from tests.planner.equal import assert_equal, features, planned
from tests.planner.mlps import WIDTH

INNER = 36


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)


class Appends(Part):
    """As blocks do that compute auxiliary losses."""

    def forward(self, x: Tensor, kept: list[Tensor], means: list[Tensor]) -> Tensor:
        h = self.up(x).relu()
        kept.append(h)
        means.append(h.square().mean())
        return x + self.down(h)


class Losses(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Appends() for _ in range(blocks))

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        means: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept, means=means)
        if means:
            x = x * torch.stack(means).sum()
        return x, kept[1].sum(-1), means, len(kept)


class Deep(Losses):
    """Only one of equal blocks is traced."""

    def __init__(self) -> None:
        super().__init__(7)


class Level(Part):
    """Half of a U-Net puts what it skips into a list, and the other half takes it out."""

    def __init__(self, descends: bool) -> None:
        super().__init__()
        self.descends = descends

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        h = self.up(x).relu()
        if self.descends:
            skips.append(h)
        else:
            h = h * skips.pop()
        return self.down(h)


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(Level(i < 3) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level in self.levels:
            x = level(x, skips)
        return x if not skips else x * 2


class Mover(nn.Module):
    """It needs another placement of what it then moves within the container."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(INNER, INNER), nn.Linear(INNER, INNER)

    def take(self, given: Any) -> Tensor:
        raise NotImplementedError

    def put(self, given: Any, old: Tensor, new: Tensor) -> None:
        raise NotImplementedError

    def forward(self, given: Any) -> None:
        old = self.take(given)
        self.put(given, old, self.down(self.up(old.softmax(-1)).relu()))


class InList(Mover):
    def take(self, given: Any) -> Tensor:
        return given.pop(0)

    def put(self, given: Any, old: Tensor, new: Tensor) -> None:
        given.append(new)
        given.insert(0, old)
        given[1] = given[1].sort(-1)[0]


class InDict(Mover):
    def take(self, given: Any) -> Tensor:
        return given.pop("h")

    def put(self, given: Any, old: Tensor, new: Tensor) -> None:
        given["old"] = [old, new]
        given["h"] = new
        given["lists"][0].append(old)


@dataclass
class State:
    h: Tensor
    more: Tensor | None = None
    kept: list[Tensor] = field(default_factory=list)


class InState(Mover):
    def take(self, given: Any) -> Tensor:
        return given.h

    def put(self, given: Any, old: Tensor, new: Tensor) -> None:
        given.h, given.more = new, old
        given.kept.append(old.softmax(-1))


class Moved(nn.Module):
    kind: type[Mover]

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.first, self.second = self.kind(), self.kind()


class OfList(Moved):
    kind = InList

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        given = [h, h.tanh()]
        self.first(given)
        self.second(given)
        return self.down(given[0] * given[-1]), [y.sum(-1) for y in given]


class OfDict(Moved):
    kind = InDict

    def forward(self, x: Tensor) -> Any:
        given: dict[str, Any] = {"h": self.up(x), "lists": ([],)}
        self.first(given)
        self.second(given)
        return self.down(given["h"] * given["old"][0] * given["lists"][0][1]), list(given)


class OfState(Moved):
    kind = InState

    def forward(self, x: Tensor) -> Any:
        given = State(self.up(x))
        self.first(given)
        self.second(given)
        assert given.more is not None
        return self.down(given.h * given.more), [y.sum(-1) for y in given.kept]


@pytest.mark.parametrize("kind", [Losses, Deep, Levels, OfList, OfDict, OfState])
@pytest.mark.parametrize("tp", [2, 3])
def test_the_caller_sees_the_change(kind: type[nn.Module], tp: int) -> None:
    torch.manual_seed(0)
    model = kind().double()
    plan = planned(copy.deepcopy(model), features(WIDTH), tp, phase="train")
    assert any("@" in p.placement for m in plan.modules.values() for p in m.parameters.values())
    assert_equal(model, features(WIDTH), plan, collectives=False, spread=0.2)


class OfArrays(Part):
    """It uses NumPy, so it is not traced."""

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(torch.from_numpy(x.detach().numpy() * 2))
        return self.down(self.up(x))


class NotTraced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OfArrays()

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        return self.inner(x, kept) + sum(kept)


def test_a_module_that_is_not_traced_must_not_change_containers() -> None:
    with pytest.raises(ModelError, match="changes what it is given"):
        planning.plan(NotTraced().double(), tp=2, args=features(WIDTH)(3, 19))


class SetsOfInput(Part):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        vars(x)["kept"] = h
        return self.down(h)


class SetsOfOutput(Part):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        y = self.down(h)
        vars(y)["kept"] = h
        return y


class Reads(Part):
    kind: type[Part]

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.kind()

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        y = self.inner(x)
        found = getattr(x, "kept", getattr(y, "kept", y))
        return y + found.mean()


class OfInput(Reads):
    kind = SetsOfInput


class OfOutput(Reads):
    kind = SetsOfOutput


class Within(Part):
    """Code that sets such an attribute for itself is fine."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        vars(h)["scale"] = 3
        return self.down(h * vars(h)["scale"]) + h.prod(-1, keepdim=True)


@pytest.mark.parametrize("kind", [OfInput, OfOutput])
def test_attributes_of_tensors_do_not_cross_modules(kind: type[Reads]) -> None:
    with pytest.raises(ModelError, match="sets the attribute 'kept' of a tensor"):
        planning.plan(kind().double(), tp=2, args=features(WIDTH)(3, 19))


def test_attributes_of_tensors_within_a_module() -> None:
    model = Within().double()
    assert_equal(model, features(WIDTH), planned(model, features(WIDTH), 2, phase="train"))
