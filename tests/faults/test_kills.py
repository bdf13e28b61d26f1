"""A sample of `benchmarks/kills.py`: one rank is killed, the others end well, nothing is mixed."""

import pytest

from benchmarks.kills import Case, Kills
from benchmarks.kills_rank import EVENTS

SEED = 1


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    return Kills(tmp_path_factory.mktemp("kills"), ranks=[2])


@pytest.fixture(scope="module")
def cases(kills: Kills) -> list[Case]:
    return [*kills.cases(len(EVENTS), 6, SEED)]


@pytest.mark.parametrize("at", range(len(EVENTS) + 6))
def test_a_rank_is_killed(kills: Kills, cases: list[Case], at: int) -> None:
    assert not kills.run(cases[at]).wrong


def test_each_stage_has_events(kills: Kills, cases: list[Case]) -> None:
    """Else nobody would be killed there."""
    assert {case.kill.stage for case in cases} == {*EVENTS}
    for report in kills.healthy[2, False]:
        assert min(stage["events"] for stage in report.values()) > 0
