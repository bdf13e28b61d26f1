"""Sizes, times and placements as the tables show them."""

import pytest

from shardwright.planner.contract.plan_file import ParameterPlan, SolverReport
from shardwright.planner.contract_tmp import crossings
from shardwright.planner.units import human_bytes, human_time, parse_bytes
from shardwright.planner.wording import (
    CROSSINGS,
    crossing_collectives,
    placement_in_words,
    solver_in_words,
)


@pytest.mark.parametrize(
    "text, size",
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("500MB", 500 * 10**6),
        ("500 mb", 500 * 10**6),
        ("1.5TiB", 3 * 2**39),
        ("123456789012345678", 123456789012345678),
        ("7B", 7),
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (15 * 2**30, "15.0 GiB"),
    ],
)
def test_human_bytes(size: int, text: str) -> None:
    assert human_bytes(size) == text


@pytest.mark.parametrize("ns, text", [(999, "999 ns"), (48384, "48.4 us"), (2 * 10**9, "2.0 s")])
def test_human_time(ns: int, text: str) -> None:
    assert human_time(ns) == text


@pytest.mark.parametrize(
    "layer, placement, use, words",
    [
        ("ColumnParallelLinear", "2@tp*32 + 2@tp*16, 64", None, "column 2@tp*32 + 2@tp*16"),
        ("RowParallelLinear", "64, 4@tp*16", None, "row 4@tp*16"),
        ("RowParallelLinear", "64", "64 | partial tp", "whole, added once"),
        ("VocabParallelEmbedding", "257@tp, 64", None, "vocab 257@tp"),
        ("LocalModule", "64, 128@tp", None, "dim 1 128@tp"),
        ("LocalModule", "4@tp*16", None, "part 4@tp*16"),
        ("LocalModule", "64", "64 | grad-partial tp", "whole, gradient summed"),
        ("LocalModule", "64", "4@tp*16", "whole, used as 4@tp*16"),
    ],
)
def test_placement_in_words(layer: str, placement: str, use: str | None, words: str) -> None:
    assert placement_in_words(layer, ParameterPlan(placement=placement, use=use)) == words


def test_collectives_are_those_that_the_planner_prices() -> None:
    """The tables speak without torch, so they have a table of their own."""
    words = {"copied": "copied", "stored parts": "shard"}
    priced = {}
    for (source, target), sides in crossings.CROSSINGS.items():
        sent = [[op for op in side if op in crossings.COLLECTIVES] for side in sides]
        pair = tuple(ops[0].split()[0].replace("_", "-") if ops else "" for ops in sent)
        key = (words.get(source, source), words.get(target, target))
        if any(pair):
            priced[key] = pair
    assert priced == CROSSINGS


def test_collectives_of_a_change_of_placement() -> None:
    assert crossing_collectives("?, 64 | partial tp", "?, 64") == ("all-reduce", "")
    assert crossing_collectives("?, 64@tp", "?, 64") == ("all-gather", "")
    assert crossing_collectives("?, 64", "?, 64 | grad-partial tp") == ("", "all-reduce")


def test_gap_of_a_plan_that_is_not_proven() -> None:
    report = SolverReport(name="backtracking", status="feasible", objective=[200, 1], bound=[190])
    assert solver_in_words(report) == (
        "found by backtracking, at most 5.00% above the optimum, not proven optimal "
        "(objective 200, bound 190)"
    )
