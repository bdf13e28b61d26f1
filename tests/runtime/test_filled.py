"""Lists, tables and objects that a call is given, and that code puts tensors into."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.calls.filled import check_filled, may_be_filled
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks

X = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)).double()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor, found: Any = None) -> Tensor:
        h = self.up(x).relu()
        if isinstance(found, list):
            found.append(h)
        elif isinstance(found, dict):
            found["h"] = h
        elif found is not None:
            found.h = h
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor, found: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, found)
        return x


def filled(model: Any, found: Any) -> Any:
    """What a call puts into `found`."""
    model(X, found)
    return found if isinstance(found, (list, dict)) else vars(found)


KINDS: tuple[Callable[[], Any], ...] = (list, dict, SimpleNamespace)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_not_left_in_what_was_given(kind: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    base = Model().double()
    plan = planning.plan(copy.deepcopy(base), 2, args=(X,))
    want, whole = base(X), filled(base.layers[1], kind())

    def work(mesh: Mesh) -> None:
        split: Any = apply(copy.deepcopy(base), plan, mesh)
        with pytest.raises(UsageError, match="has put a tensor into argument 'found'"):
            split(X, kind())
        torch.testing.assert_close(split(X), want)
        torch.testing.assert_close(filled(split.layers[1], kind()), whole)  # its modules, alone

    run_ranks(2, work)


def test_one_in_the_place_in_memory_of_what_went_is_new() -> None:
    found = SimpleNamespace(h=torch.ones(3))
    given, place = may_be_filled({"found": found}, ()), id(found.h)
    check_filled(given, None)
    del found.h
    others = [torch.ones(3)]
    while id(others[-1]) != place and len(others) < 10_000:
        others.append(torch.ones(3))
    assert id(others[-1]) == place
    found.h = others[-1]
    with pytest.raises(UsageError, match="has put a tensor into argument 'found'"):
        check_filled(given, None)


@pytest.mark.parametrize("kind", KINDS)
def test_planned_with_them_what_fills_them_stays_whole(kind: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    base = Model().double()
    plan = planning.plan(copy.deepcopy(base), 2, args=(X,), kwargs={"found": kind()})

    want = filled(base, kind())

    def work(mesh: Mesh) -> None:
        split = apply(copy.deepcopy(base), plan, mesh)
        torch.testing.assert_close(filled(split, kind()), want)

    run_ranks(2, work)
