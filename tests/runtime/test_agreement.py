"""What ranks tell each other, however long, and what they say where they differ."""

import pytest

from shardwright.errors import CheckpointError, DistributedError
from shardwright.runtime.ranks.agreement import AT_ONCE, agree, gather
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    "lengths", [(0, 3, 1), (AT_ONCE, AT_ONCE + 1, 2), (AT_ONCE - 100, 9 * AT_ONCE, 4 * AT_ONCE)]
)
def test_each_rank_hears_all_of_the_others(lengths: tuple[int, ...]) -> None:
    told = [bytes(range(256)) * (length // 256) + b" " * (length % 256) for length in lengths]

    def work(mesh):
        return gather("telling", told[mesh["tp"].rank], mesh["tp"].pg)

    assert run_ranks(3, work) == [told] * 3


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
