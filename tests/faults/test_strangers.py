"""Somebody else connects to every port that ranks open: nothing runs, and the ranks go on."""

from pathlib import Path

import pytest

from benchmarks.faults.outcomes import Tally
from benchmarks.faults.strangers import ATTEMPTS, attacked, prepare


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strangers")
    prepare(folder)
    return folder


@pytest.mark.parametrize("kind", ATTEMPTS)
def test_nothing_of_a_stranger_runs(place: Path, kind: str) -> None:
    """And of ranks that a command starts, no other machine can reach a port."""
    tally = Tally()
    assert attacked(tally, kind, place) >= 3
    assert tally.ok, tally.cases
