"""Code that cuts a tensor into pieces, takes them in another order, and joins them again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.planner.equal import assert_equal, features, planned

WIDTH, INNER, PIECE = 24, 48, 12


class Turned(nn.Module):
    def __init__(self, turn: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.turn = turn
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.cat(self.turn(self.up(x).relu()), -1))


def _split(h: Tensor) -> list[Tensor]:
    first, *others = h.split(12, -1)
    return [*others, first]


def _chunk(h: Tensor) -> list[Tensor]:
    return [*h.chunk(h.shape[-1] // PIECE, -1)][::-1]


def _slice(h: Tensor) -> list[Tensor]:
    return [h[..., at : at + PIECE] for at in range(0, h.shape[-1], PIECE)][::-1]


def _halves(h: Tensor) -> list[Tensor]:
    return [*h.chunk(2, -1)][::-1]


@pytest.mark.parametrize("turn", [_split, _chunk, _slice, _halves])
@pytest.mark.parametrize("tp", [2, 3])
def test_pieces_are_those_of_the_whole(turn: Callable[[Tensor], list[Tensor]], tp: int) -> None:
    """A shard may have fewer pieces of a size, and the result has the same shape."""
    model = Turned(turn).double()
    plan = planned(model, features(WIDTH), tp)
    assert_equal(model, features(WIDTH), plan, collectives=False)
    if turn is _halves:
        assert "@" in plan.modules["up"].parameters["bias"].placement
