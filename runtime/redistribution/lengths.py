"""Whole lengths of axes that are split at run time: what a rank that holds a part cannot see.

A sequence of 19 over 4 ranks lies as 5, 5, 5 and 4, and one of 20 as 5 each: who gathers must know
which it was. Every part was cut off a whole one earlier in the same forward pass, so the length is
noted there, under the name that the plan gives the axis, and found again without a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import shard_range
from shardwright.runtime.communication.mesh import Group


class Lengths:
    """The lengths that one model's forward pass has split so far, by axis.

    Outside a forward pass of the root (a module within is called by itself, or runs again for
    gradient checkpointing) the last length of an axis replaces those before it.
    """

    def __init__(self) -> None:
        self.axes: set[str] = set()
        self._noted: dict[str, set[int]] = {}
        self._running = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """One forward pass of the root: it may split several lengths of one axis."""
        outer, self._running = self._running, True
        if not outer:
            self._noted.clear()
        try:
            yield
        finally:
            self._running = outer

    def note(self, axis: str, whole: int) -> None:
        """A tensor whose `axis` is `whole` long is being split."""
        if not self._running:
            self._noted.pop(axis, None)
        self._noted.setdefault(axis, set()).add(whole)

    def find(self, axis: str, own: int, group: Group) -> int:
        """The whole length of `axis`, of which this rank of `group` holds `own`.

        Raises:
            PlanError: no length noted gives such a part, or two cannot be told apart on some rank
                (then on every rank, so that none waits for another).
        """
        noted = sorted(self._noted.get(axis, ()))
        found = [n for n in noted if _part(n, group.rank, group.size) == own]
        if not found:
            known = ", ".join(map(str, noted)) or "none"
            raise PlanError(
                f"a part of {own} along '{axis}' on rank {group.rank} of {group.size} belongs to "
                f"no length that this forward pass has split ({known}): the model's code changed "
                "the length of a split sequence; plan without sequence_parallel or cp"
            )
        for other in noted:
            if other != found[0] and _alike(other, found[0], group.size):
                raise PlanError(
                    f"this forward pass splits '{axis}' in lengths {found[0]} and {other}, which "
                    f"some of {group.size} ranks cannot tell apart: plan without sequence_parallel "
                    "or cp"
                )
        return found[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Lengths:
        return self  # a copied model shares its redistributions, which note their lengths here


@dataclass(frozen=True)
class Length:
    """One axis of `lengths`: what a redistribution that shards or gathers it needs to know."""

    lengths: Lengths
    axis: str

    def __post_init__(self) -> None:
        self.lengths.axes.add(self.axis)

    def note(self, whole: int) -> None:
        """See `Lengths.note`."""
        self.lengths.note(self.axis, whole)

    def find(self, own: int, group: Group) -> int:
        """See `Lengths.find`."""
        return self.lengths.find(self.axis, own, group)


def _part(whole: int, rank: int, ranks: int) -> int:
    start, stop = shard_range(whole, rank, ranks)
    return stop - start


def _alike(a: int, b: int, ranks: int) -> bool:
    return any(_part(a, r, ranks) == _part(b, r, ranks) for r in range(ranks))
