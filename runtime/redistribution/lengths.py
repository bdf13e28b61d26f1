"""Full lengths of axes that are split at run time, which a rank with one part cannot see.

A sequence of 19 over 4 ranks is split into 5, 5, 5 and 4, and one of 20 into 5 each. A gather must
know which it was. Every part was cut from a full axis earlier in the same forward pass, so the
length is noted there, under the plan's name for the axis, and found again without a collective.
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

    Outside a forward pass of the root model (a submodule is called by itself, or runs again for
    gradient checkpointing), a new length of an axis replaces the earlier ones.
    """

    def __init__(self) -> None:
        self.axes: set[str] = set()
        self._noted: dict[str, set[int]] = {}
        self._running = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enclose a forward pass of the root model, which may split several lengths of an axis."""
        outer, self._running = self._running, True
        if not outer:
            self._noted.clear()
        try:
            yield
        finally:
            self._running = outer

    def note(self, axis: str, whole: int) -> None:
        """Note that a tensor whose `axis` has the full length `whole` is being split."""
        if not self._running:
            self._noted.pop(axis, None)
        self._noted.setdefault(axis, set()).add(whole)

    def find(self, axis: str, own: int, group: Group) -> int:
        """Return the full length of `axis`, of which this rank of `group` holds `own`.

        Raises:
            PlanError: no noted length has such a part, or some rank cannot tell two of them apart.
                The second is then raised on every rank, so that none waits for another.
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
    """One axis of `lengths`, for a redistribution that shards or gathers it."""

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
