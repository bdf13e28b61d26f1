"""Modules that hypothesis makes are split and equal, or refused: `benchmarks.made` makes more."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.made.modules import sources
from tests.made.outcome import BUGS, outcome


def test_outcomes_are_equal_or_errors_of_ours(tmp_path: Path) -> None:
    """Outputs, gradients and buffers in both modes, under other sizes than were traced."""
    words = []

    @settings(
        max_examples=12,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(sources(), st.sampled_from((2, 3)))
    def each(source: str, tp: int) -> None:
        found = outcome(source, tp, tmp_path)
        assert found.word not in BUGS, f"{found.text}\n{source}"
        words.append(found.word if found.share < 0.9 else "whole")

    each()
    assert words.count("equal") > len(words) / 2
