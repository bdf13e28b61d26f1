"""Our rows of the sweep held against transformers' own plans."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.zoo_peer import against, peers, summary


def _row(name: str, gathers: int, held: int, whole: int = 100) -> dict[str, Any]:
    forward = {"all_reduce": 4, "all_gather": gathers}
    return {"kind": "causal", "name": name, "forward": forward, "bytes": held, "whole_bytes": whole}


def test_against_tells_who_takes_more_and_holds_more() -> None:
    theirs = {("causal", "a"): _row("a", gathers=1, held=50)}

    same = against(_row("a", gathers=1, held=100, whole=200), theirs)  # in float64
    more = against(_row("a", gathers=2, held=40), theirs)

    assert same is not None and (same.collectives, same.bytes, same.text) == (0, 0, "5")
    assert more is not None and more.collectives == 1
    assert more.bytes == pytest.approx(-0.1) and more.text == "5*"
    assert against(_row("b", gathers=1, held=50), theirs) is None
    assert against({"kind": "causal", "name": "a", "error": "none"}, theirs) is None


def test_summary_names_what_is_above() -> None:
    held = {"few": 50, "many": 50, "whole": 90}
    theirs = {("causal", n): _row(n, gathers=3, held=b) for n, b in held.items()}
    ours = [_row("few", 1, 50), _row("many", 4, 51), _row("whole", 5, 50)]

    assert summary(ours, theirs) == [
        "against transformers' own plans, 3 of which run:",
        "  collectives of a forward: 1 below, 0 equal, 2 above",
        "  bytes a rank: 1 below, 1 equal, 1 above",
        "  more collectives: many (8 for 7)",
        "  more, but its plan leaves weights whole: whole (9 for 7)",
        "  more bytes: many (1.0%)",
    ]
    assert summary(ours, {}) == []


def test_what_was_measured_has_the_known_counts() -> None:
    measured = peers(2)

    counts = {n: sum(measured["causal", n]["forward"].values()) for n in ("llama", "olmo2", "phi3")}
    assert counts == {"llama": 6, "olmo2": 12, "phi3": 10}
    assert peers(3) == {}
