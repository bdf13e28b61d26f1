"""Ranks start together within `timeout`, or each says in one line which of them did not come."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.forked import Ended
from tests.faults import ranks
from tests.faults.conftest import Start, all_well, errors

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


@pytest.mark.parametrize("ranks_and_plan", [(4, "plan-mesh.json", 2), (2, "plan-2.json", 1)])
def test_timeout_holds_for_all_groups_but_the_users(
    folder: Path, start: Start, ranks_and_plan: tuple[int, str, int]
) -> None:
    size, plan, dims = ranks_and_plan
    ends = start(size, ranks.timeouts, folder / plan, 77.0)
    said = " ".join(["86400.0", "77.0", *["77.0"] * dims])
    assert [end.log.splitlines() for end in ends] == [[said, "all here"]] * size, ends


def test_idle_ranks_wait_longer_than_the_timeout(folder: Path, start: Start) -> None:
    all_well(start(2, ranks.waits_for_a_request, folder / "model", folder / "plan-2.json", 5.0))


def test_a_rank_that_dies_while_others_are_idle(folder: Path, start: Start) -> None:
    """Those that wait in torch's own collectives end as well, in torch's words."""
    ends = start(4, ranks.dies_while_others_wait, folder / "model", folder / "plan-4.json")
    assert ends[0].how == "error"
    assert re.search("no answer from ranks? 1.*, which died or hangs", ends[0].text)
    assert {end.how for end in ends[2:]} == {"raw"} and in_time(ends)
