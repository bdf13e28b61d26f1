"""Some of `benchmarks/ranks.py`: heads and sequences that ranks do not divide, on gloo ranks."""

from __future__ import annotations

from benchmarks.ranks_case import HEADS, SEQUENCE, compared, passed
from benchmarks.zoo_ranks import sweep

JOBS = [(HEADS, "6 heads over 4"), (SEQUENCE, "gpt2, 19 tokens")]


def test_equal_in_float64_on_processes() -> None:
    """Logits, all gradients and a decode step, at 1e-9."""
    rows = list(sweep(JOBS, 4, compared, 1, 300))
    assert len(rows) == len(JOBS)
    for row in rows:
        assert passed(row), row
        assert row["tolerance"] == 1e-9
