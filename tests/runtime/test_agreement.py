"""What ranks tell each other, however long, and what they say where they differ."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import CheckpointError, DistributedError
from shardwright.runtime.ranks.agreement import (
    AT_ONCE,
    LENGTH,
    _all_gathered,
    _exchanged,
    agree,
    gather,
)
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    "lengths", [(0, 3, 1), (AT_ONCE, AT_ONCE + 1, 2), (AT_ONCE - 100, 9 * AT_ONCE, 4 * AT_ONCE)]
)
def test_each_rank_hears_all_of_the_others(lengths: tuple[int, ...]) -> None:
    told = [('all that ranks say, "ä" ' * length)[:length] for length in lengths]

    def work(mesh):
        return gather("telling", told[mesh["tp"].rank], mesh["tp"].pg, str)

    assert run_ranks(3, work) == [told] * 3


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.write_text, (self.trace, "this ran")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"telling\n{bomb}", "rank 1 sent a message that cannot be read"),
        (b"{bomb}", "the ranks do different things"),
        (b"", "the ranks do different things"),
        (b"telling\n[1, 2", "cannot be read"),
        (b"telling\n[1, 2]", "cannot be read"),
        (b"sharing memory\nnull", "rank 0 is at 'telling', rank 1 at 'sharing memory': let"),
    ],
)
def test_a_message_that_is_none_is_refused_and_never_unpickled(
    tmp_path: Path, message: bytes, words: str
) -> None:
    message = message.replace(b"{bomb}", pickle.dumps(Bomb(tmp_path / "ran")))

    def work(mesh) -> Any:
        group = mesh["tp"].pg
        if mesh["tp"].rank == 1:
            return len(_exchanged(message, group))
        with pytest.raises(DistributedError) as caught:
            gather("telling", "words", group, str)
        return str(caught.value)

    refused, _ = run_ranks(2, work)
    assert words in refused and "\n" not in refused
    assert not (tmp_path / "ran").exists()


def test_a_message_without_end_is_refused() -> None:
    def work(mesh):
        group = mesh["tp"].pg
        if mesh["tp"].rank == 1:
            return _all_gathered(b"\xff" * (LENGTH + AT_ONCE), group)
        with pytest.raises(DistributedError, match="too long"):
            gather("telling", "words", group, str)

    run_ranks(2, work)


def test_what_decides_on_the_rest_is_named_first() -> None:
    def work(mesh):
        rank = mesh["tp"].rank
        facts = {"plan": f"plan {rank}", "dtype": "a" * rank}
        with pytest.raises(DistributedError) as caught:
            agree("loading", None, facts, [mesh["tp"].pg])
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert first == second
    assert "do not have the same plan: rank 0 has plan 0, rank 1 has plan 1" in first


def test_a_failure_is_told_whole() -> None:
    text = "x" * 3 * AT_ONCE

    def work(mesh):
        failure = CheckpointError(text) if mesh["tp"].rank == 1 else None
        with pytest.raises(CheckpointError) as caught:
            agree("loading", failure, {}, [mesh["tp"].pg])
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert first == f"loading failed on rank 1: {text}"
    assert second == text
