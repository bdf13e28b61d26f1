"""The canary of tests/ranks.py: in-process ranks compute, differ, and fail as they should."""

import pytest
import torch

from shardwright.runtime.communication.collectives import all_gather, all_reduce, reduce_scatter
from tests.ranks import run_ranks


def test_collectives_give_right_numbers():
    def work(mesh):
        group = mesh["tp"]
        x = torch.tensor([1.0, 2.0]) * (group.rank + 1)
        rows = torch.arange(6.0).view(3, 2) + group.rank
        return all_reduce(x, group), all_gather(x, group), reduce_scatter(rows, group), x

    for rank, (reduced, gathered, scattered, x) in enumerate(run_ranks(3, work)):
        assert reduced.tolist() == [6, 12]
        assert gathered.tolist() == [[1, 2], [2, 4], [3, 6]]
        assert scattered.tolist() == [6 * rank + 3, 6 * rank + 6]
        assert x.tolist() == [rank + 1, 2 * rank + 2], "inputs stay as they are"


def test_two_mesh_dims():
    def work(mesh):
        x = torch.tensor([float(10 * mesh["a"].rank + mesh["b"].rank)])
        return all_reduce(x, mesh["a"]).item(), all_reduce(x, mesh["b"]).item()

    assert run_ranks(4, work, {"a": 2, "b": 2}) == [(10, 1), (12, 1), (10, 21), (12, 21)]


def test_a_failing_rank_ends_the_others_and_the_next_run_works():
    def bad(mesh):
        if mesh["tp"].rank == 1:
            raise ValueError("rank 1 fails")
        return all_reduce(torch.ones(1), mesh["tp"])

    with pytest.raises(ValueError, match="rank 1 fails"):
        run_ranks(2, bad)
    assert run_ranks(2, lambda mesh: mesh["tp"].rank) == [0, 1]
