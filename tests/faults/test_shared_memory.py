"""Ranks as processes that share memory; those that die or hang are in `test_blame.py`."""

from pathlib import Path

import pytest

from tests.faults import ranks
from tests.faults.conftest import Start, all_well


def test_each_group_of_a_mesh_computes_what_gloo_does(folder: Path, start: Start) -> None:
    ends = start(4, ranks.shares_memory, folder / "plan-mesh.json", True)
    all_well(ends)


@pytest.mark.parametrize("environ", [{"SHARDWRIGHT_SHARED_MEMORY": "0"}, {"CXX": "/nowhere/c++"}])
def test_where_one_rank_cannot_none_does(
    folder: Path, start: Start, tmp_path: Path, environ: dict[str, str]
) -> None:
    environ = {**environ, "XDG_CACHE_HOME": str(tmp_path)}
    ends = start(2, ranks.shares_memory, folder / "plan-2.json", False, environ=[{}, environ])
    all_well(ends)


def test_where_no_memory_is_left_none_is_shared(folder: Path, start: Start) -> None:
    all_well(start(2, ranks.finds_no_memory, folder / "plan-2.json"))


def test_a_split_model_computes_the_same_bits_as_over_gloo(folder: Path, start: Start) -> None:
    """Of two ranks, whose sums have one order."""
    logs = [
        start(2, ranks.computes, folder / "model", folder / "plan-train.json", environ=[env] * 2)
        for env in ({}, {"SHARDWRIGHT_SHARED_MEMORY": "0"})
    ]
    for ends in logs:
        all_well(ends)
    shared, gloo = ([end.log.splitlines()[-1] for end in ends] for ends in logs)
    assert shared == gloo and "0x" in shared[0]


def test_a_fork_of_a_rank(folder: Path, start: Start) -> None:
    ends = start(2, ranks.forks, folder / "plan-2.json")
    all_well(ends)
