"""The meshes of a plan on its page: a chart whose labels can be read, and a table."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.planner.contract.plan_figures import MeshChoice
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.mesh_chart import LETTER, LINE, WIDTH, Dot, mesh_chart
from shardwright.planner.picture.page import page
from shardwright.planner.picture.view import Shown
from tests.picture.test_drawing import Net
from tests.planning import plan

figures = st.integers(1, 1 << 40)


@cache
def net() -> Plan:
    return plan(Net(), tp=2, args=(torch.zeros(3, 19, 64),))


def compared(found: list[tuple[int, int, bool]]) -> Plan:
    choices = [
        MeshChoice(mesh={"dp": 2**i, "tp": 64}, fits=fits, memory=size, time_ns=time,
                   phase_ns={"prefill": time}, why="" if fits else "does not fit")
        for i, (size, time, fits) in enumerate(found)
    ]  # fmt: skip
    return net().model_copy(update={"meshes": choices})


def box(dot: Dot) -> tuple[float, float, float]:
    """Start, end and baseline of a label."""
    wide = len(dot.label) * LETTER
    start = dot.x - wide - 10 if dot.left else dot.x + 10
    return start, start + wide, dot.label_y


@given(st.lists(st.tuples(figures, figures, st.booleans()), min_size=2, max_size=12), figures)
def test_labels_stay_inside_and_apart(found: list[tuple[int, int, bool]], limit: int) -> None:
    chart = mesh_chart(compared(found), limit)
    assert chart is not None and len(chart.dots) == len(found)
    boxes = [box(dot) for dot in chart.dots]
    assert all(start >= 0 and end <= WIDTH for start, end, _ in boxes)
    for (a, b, y), (c, d, z) in combinations(boxes, 2):
        assert abs(y - z) >= LINE or b <= c or d <= a
    line = [tuple(map(float, pair.split(","))) for pair in chart.frontier.split()]
    assert line == sorted(line)
    assert [y for _, y in line] == sorted(y for _, y in line)  # fewer bytes, more time: further up
    assert chart.limit is None or 0 <= chart.limit <= WIDTH


def test_the_page_has_the_chart_and_a_row_for_each_mesh() -> None:
    shown = compared([(100, 50, True), (50, 100, True), (400, 70, False)])
    text = page([Shown(shown)])
    assert '<svg class="meshes"' in text and text.count("<circle") == 3
    assert text.count("does not fit") == 1 and "0.50 times the bytes" in text
    assert '<svg class="meshes"' not in page([Shown(net())])
    alone = page([Shown(compared([(100, 50, True)]))])
    assert '<svg class="meshes"' not in alone and "the plan" in alone
