"""A colour for each rank.

From dark to light in one order of hues, so that ranks are told apart by those who see few colours,
and in print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.planner.contract.mesh import Coords


@dataclass(frozen=True)
class Palette:
    """Where the ranks of one copy of the model stand, and their colours."""

    ranks: list[Coords]
    colours: list[str]

    def fill(self, holders: Sequence[int]) -> str:
        """The colour of what these ranks hold: that of the first, or of what all hold."""
        alone = len(holders) == len(self.colours) > 1 or not holders
        return WHOLE if alone else self.colours[holders[0]]


STOPS = ("#2c5f92", "#2f7d85", "#5d8f5b", "#a0963c", "#d69a45", "#f0a583", "#f3bccb")
WHOLE = "var(--whole)"
"""The colour of what every rank holds."""


def colours(ranks: int) -> list[str]:
    """A colour for each of so many ranks."""
    last = 0.66 if ranks < 4 else 1.0
    return [_between(last * rank / max(ranks - 1, 1)) for rank in range(ranks)]


def ink(colour: str) -> str:
    """What is read on it: black or white; on what is no colour but a variable, that of the page."""
    if not colour.startswith("#"):
        return "var(--ink)"
    red, green, blue = _parts(colour)
    return "#fff" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else "#1a1d21"


def _between(at: float) -> str:
    place = at * (len(STOPS) - 1)
    low = min(int(place), len(STOPS) - 2)
    ends = zip(_parts(STOPS[low]), _parts(STOPS[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in ends)


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
