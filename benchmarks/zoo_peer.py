"""Compares our rows of the sweep with those of transformers' own plans (`benchmarks/peer.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
PART = 0.01
"""Its plan replicates parts if a rank holds this share more of all bytes than with ours."""

Row = dict[str, Any]
Peers = dict[tuple[str, str], Row]
"""Kind and name of an architecture -> its row, for those that transformers can run."""


class Against(NamedTuple):
    """The comparison of one architecture; differences are ours minus theirs."""

    name: str
    ours: int
    theirs: int
    comparable: bool
    """Whether its plan splits about as much as ours; otherwise fewer collectives mean little."""
    bytes: float
    """How many more bytes a rank holds, as a share of all; 0 only if exactly as many."""

    @property
    def collectives(self) -> int:
        """Return how many more collectives our forward takes than theirs."""
        return self.ours - self.theirs

    @property
    def text(self) -> str:
        """Return the number for a cell, with a star if their plan replicates parts."""
        return f"{self.theirs}" + ("" if self.comparable else "*")


def peers(tp: int) -> Peers:
    """Return what was measured on this many ranks; empty if nothing was."""
    path = RESULTS / f"peer_tp{tp}.json"
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {(r["kind"], r["name"]): r for r in rows if "forward" in r}


def against(row: Row, found: Peers) -> Against | None:
    """Compare our row with theirs; None if there is none."""
    theirs = found.get((row["kind"], row["name"]))
    if theirs is None or "forward" not in row:
        return None
    ours, other = sum(row["forward"].values()), sum(theirs["forward"].values())
    # The sweep's models may be in float64: compare shares of the total.
    shares = [Fraction(r["bytes"], r["whole_bytes"]) for r in (row, theirs)]
    more = float(shares[0] - shares[1])
    return Against(row["name"], ours, other, more >= -PART, more)


def summary(rows: Sequence[Row], found: Peers) -> list[str]:
    """Return lines that say how often we are below, equal and above, and where above."""
    all_ = [a for row in rows if (a := against(row, found))]
    if not all_:
        return []
    more = [a for a in all_ if a.collectives > 0]
    signs = {
        "collectives of a forward": [a.collectives for a in all_],
        "bytes a rank": [a.bytes for a in all_],
    }
    lines = [f"against transformers' own plans, {len(all_)} of which run:"]
    for what, values in signs.items():
        below, equal = sum(v < 0 for v in values), sum(v == 0 for v in values)
        lines.append(f"  {what}: {below} below, {equal} equal, {len(values) - below - equal} above")
    for title, names in (
        ("more collectives", [_more(a) for a in more if a.comparable]),
        ("more, but its plan leaves weights whole", [_more(a) for a in more if not a.comparable]),
        ("more bytes", [f"{a.name} ({a.bytes:.1%})" for a in all_ if a.bytes > 0]),
    ):
        if names:
            lines.append(f"  {title}: {', '.join(names)}")
    return lines


def _more(a: Against) -> str:
    return f"{a.name} ({a.ours} for {a.theirs})"
