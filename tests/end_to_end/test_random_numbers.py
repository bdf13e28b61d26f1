"""Random numbers on real ranks, each from a seed of its own: those of the unsplit model.

In threads all ranks would draw from one generator.
"""

from pathlib import Path

from benchmarks.forked import run_forked

from . import random_numbers


def test_ranks_draw_what_the_unsplit_model_draws(tmp_path: Path) -> None:
    """Dropout, of wholes and of parts, and tokens that are sampled."""
    for end in run_forked(2, random_numbers.main, (), tmp_path, limit=300):
        assert end.how == "well", (end.text, end.log)
