"""Ranks start together within `timeout`, or each says in one line which of them did not come."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.forked import Ended
from tests.faults import ranks
from tests.faults.conftest import Start, errors

TIMEOUT = 5.0


def in_time(ends: list[Ended]) -> bool:
    """Nobody hung: a group alone would wait for half an hour."""
    return all(end.how != "hangs" for end in ends)


@pytest.mark.parametrize(
    "missing, plan",
    [
        (ranks.never_comes, "plan-4.json"),
        (ranks.dies_before_it_comes, "plan-4.json"),
        (ranks.dies_when_all_have_come, "plan-4.json"),
        (ranks.dies_between_groups, "plan-4.json"),
        (ranks.dies_between_groups, "plan-mesh.json"),
    ],
)
def test_a_rank_that_does_not_come_is_named(
    folder: Path, start: Start, missing: Callable[..., None], plan: str
) -> None:
    ends = start(4, missing, folder / plan, TIMEOUT)
    assert in_time(ends)
    for rank in (0, 2, 3):
        assert ends[rank].how == "error", ends[rank]
        assert f"starting failed on rank {rank}: " in ends[rank].text
        assert "rank 1" in ends[rank].text.replace(f"on rank {rank}", "")
        assert "look at the output of rank 1" in ends[rank].text


@pytest.mark.parametrize("odd", [0, 1])
def test_another_world_size_on_one_rank(folder: Path, start: Start, odd: int) -> None:
    environ: list[dict[str, str]] = [{}, {}]
    environ[odd] = {"WORLD_SIZE": "3"}
    ends = start(2, ranks.starts, folder / "plan-2.json", TIMEOUT, environ=environ)
    text = (
        "DistributedError: the ranks were told different things: rank {} that there are 2, "
        "rank {} that there are 3: give all of them the same WORLD_SIZE"
    )
    assert errors(ends) == [text.format(1 - odd, odd)] * 2


def test_environment_that_is_not_of_torchrun(folder: Path, start: Start) -> None:
    ends = start(1, ranks.starts, folder / "plan-2.json", TIMEOUT, environ=[{"WORLD_SIZE": "x"}])
    assert errors(ends) == [
        "DistributedError: the environment's WORLD_SIZE is 'x', which is not a number: start the "
        "ranks with torchrun"
    ]


def test_timeout_holds_for_all_groups(folder: Path, start: Start) -> None:
    ends = start(4, ranks.timeouts, folder / "plan-mesh.json", 77.0)
    assert [end.log.splitlines() for end in ends] == [["77.0 77.0 77.0", "all here"]] * 4, ends
