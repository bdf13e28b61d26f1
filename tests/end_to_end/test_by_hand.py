"""Collectives of users on parameters and gradients of a split model: those of full tensors."""

from pathlib import Path

from tests.end_to_end import by_hand
from tests.end_to_end.test_loops import well


def test_copies_that_average_by_hand(tmp_path: Path) -> None:
    """All-reduced gradients, gathered parameters, and those of one copy sent to the other."""
    well(4, by_hand.main, tmp_path)
