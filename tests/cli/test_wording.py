"""Sizes, times and placements as the tables show them."""

from collections import Counter

import pytest

from shardwright.planner.contract.mesh import coords_of
from shardwright.planner.contract.plan_figures import SolverReport
from shardwright.planner.contract.plan_file import ParameterPlan, Redistribution
from shardwright.planner.contract.transitions import Kind, route
from shardwright.planner.units import human_bytes, human_time, parse_bytes
from shardwright.planner.wording import (
    collectives_in_words,
    collectives_of,
    placement_in_words,
    solver_in_words,
)
from tests.runtime.kinds import EXAMPLES, sent


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
        ("RowParallelLinear", "64", "64 | partial tp", "replicated, added once"),
        ("VocabParallelEmbedding", "257@tp, 64", None, "vocab 257@tp"),
        ("LocalModule", "64, 128@tp", None, "dim 1 128@tp"),
        ("LocalModule", "4@tp*16", None, "part 4@tp*16"),
        ("LocalModule", "64", "64 | grad-partial tp", "replicated, gradient summed"),
        ("LocalModule", "64", "4@tp*16", "replicated, used as 4@tp*16"),
    ],
)
def test_placement_in_words(layer: str, placement: str, use: str | None, words: str) -> None:
    assert placement_in_words(layer, ParameterPlan(placement=placement, use=use)) == words


COORDS = {"tp": (0, 2)}


def test_collectives_of_a_change_of_placement() -> None:
    assert collectives_of("?, 64 | partial tp", "?, 64", COORDS) == [("all-reduce", "")]
    assert collectives_of("?, 64@tp", "?, 64", COORDS) == [("all-gather", "")]
    assert collectives_of("?, 64", "?, 64 | grad-partial tp", COORDS) == [("", "all-reduce")]
    assert collectives_of("?, 64", "?, 64", COORDS) == []


@pytest.mark.parametrize(
    "source, target",
    [
        *((EXAMPLES[a], EXAMPLES[b]) for a in Kind for b in Kind if route(a, b) is not None),
        ("4@tp, 6", "4, 6@tp"),
        ("4, 6 | partial tp.0", "2@tp.0*2@tp.1, 6"),
        ("4, 6 | partial tp", "2@tp.0*2, 6 | grad-partial tp.1"),
    ],
)
def test_collectives_in_words_are_those_that_ranks_make(source: str, target: str) -> None:
    sub_axes = {"tp": [2, 2]} if "tp.0" in source + target else {}
    ranks = 4 if sub_axes else 2
    counted = sent(source, target, ranks, sub_axes)
    made = Counter(
        f"{way} {call.kind.replace('_', '-')}"
        for way, calls in zip(("fwd", "bwd"), counted, strict=True)
        for call in calls
    )
    change = Redistribution(slot="", source=source, target=target)
    words = collectives_in_words([change], coords_of({"tp": ranks}, sub_axes, 0))
    said = [line.partition(" x") for line in words.splitlines()]
    assert made == {text: int(times or 1) for text, _, times in said}


def test_gap_of_a_plan_that_is_not_proven() -> None:
    report = SolverReport(name="backtracking", status="feasible", objective=[200, 1], bound=[190])
    assert solver_in_words(report) == (
        "found by backtracking, at most 5.00% above the optimum, not proven optimal "
        "(objective 200, bound 190)"
    )
