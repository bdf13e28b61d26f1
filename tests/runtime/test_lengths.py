"""A length that was split is found again from a part, or it is an error: nothing is guessed."""

import pytest

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import shard_range
from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.redistribution.lengths import Lengths


def parts(whole: int, ranks: int) -> list[int]:
    return [b - a for a, b in (shard_range(whole, r, ranks) for r in range(ranks))]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("whole", [1, 3, 16, 19])
def test_every_rank_finds_the_whole(whole, ranks):
    lengths = Lengths()
    with lengths.forward():
        lengths.note("ids", whole)
        lengths.note("other", 20)
        for rank, own in enumerate(parts(whole, ranks)):
            assert lengths.find("ids", own, Group(rank, ranks)) == whole


def test_lengths_that_a_rank_cannot_tell_apart_are_refused_on_every_rank():
    lengths = Lengths()
    with lengths.forward():
        lengths.note("ids", 19)
        lengths.note("ids", 20)
        for rank, own in enumerate(parts(19, 4)):
            with pytest.raises(PlanError, match="cannot tell apart"):
                lengths.find("ids", own, Group(rank, 4))


def test_lengths_that_differ_on_all_ranks_live_side_by_side():
    lengths = Lengths()
    with lengths.forward():
        lengths.note("ids", 19)
        lengths.note("ids", 8)
        for rank in range(4):
            assert lengths.find("ids", parts(19, 4)[rank], Group(rank, 4)) == 19
            assert lengths.find("ids", parts(8, 4)[rank], Group(rank, 4)) == 8


def test_a_part_of_nothing_that_was_split():
    lengths = Lengths()
    lengths.note("ids", 19)
    with pytest.raises(PlanError, match=r"a part of 1 along 'ids' on rank 0 of 2 .* \(19\)"):
        lengths.find("ids", 1, Group(0, 2))


def test_a_forward_pass_begins_anew_and_outside_of_one_the_last_length_counts():
    lengths, group = Lengths(), Group(0, 4)
    for whole in (20, 19):
        with lengths.forward():
            lengths.note("ids", whole)
        assert lengths.find("ids", 5, group) == whole
    lengths.note("ids", 20)
    assert lengths.find("ids", 5, group) == 20
