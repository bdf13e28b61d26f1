"""Ranks start again in a store that kept what earlier ones wrote, as torchrun's agent does.

Torch alone finds the addresses of the ranks that ended there, and hangs. `examples/restart.py` is
the whole way under torchrun; `tests/end_to_end/test_examples.py` runs it.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.forked import Ended, agent_store, run_forked
from tests.faults import ranks
from tests.faults.conftest import all_well, errors


def counts(*of_ranks: int) -> list[dict[str, str]]:
    """How often torchrun says that ranks were restarted; agents of two machines may differ."""
    return [{"TORCHELASTIC_RESTART_COUNT": str(count)} for count in of_ranks]


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_start_again_after_one_was_killed(folder: Path, tmp_path: Path, late: int) -> None:
    store = agent_store()

    def start(victim: int, *restarts: int) -> list[Ended]:
        given = (folder / "model", folder / "plan-2.json", late, victim)
        environ = counts(*restarts)
        return run_forked(2, ranks.starts_again, given, tmp_path, environ=environ, agent=store)

    for victim in (1, 0):
        text = errors(start(victim, 1 - victim, 1 - victim))
        assert f"no answer from rank {victim}, which died or hangs" in text[0]
    for restarts in ((2, 2), (2, 1)):
        ends = start(-1, *restarts)
        all_well(ends)
        assert ends[0].log == ends[1].log != "", ends


def test_rank_0_does_not_come_again(folder: Path, tmp_path: Path) -> None:
    """What its predecessor wrote is not taken for an answer."""
    store, given = agent_store(), (folder / "plan-2.json", 2.0)
    first = run_forked(2, ranks.starts, given, tmp_path, agent=store)
    assert {end.how for end in first} == {"well"}, first
    _, end = run_forked(2, ranks.rank_0_never_comes, given, tmp_path, agent=store)
    assert end.text == (
        "DistributedError: starting failed on rank 1: rank 0 died or did not come in time: look at "
        "the output of rank 0, or give a longer `timeout`"
    )


def test_a_stranger_writes_over_what_a_rank_asks(folder: Path, tmp_path: Path) -> None:
    store, given = agent_store(), (folder / "plan-2.json", 20.0)
    no_text: Any = b"\x80\x04"
    store.set("shardwright/asks/1", no_text)
    all_well(run_forked(2, ranks.starts, given, tmp_path, agent=store))
