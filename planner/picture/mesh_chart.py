"""Draws the meshes that were compared: time against bytes on a rank, and which no other beats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.planner.contract.plan_figures import MeshChoice
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.report.mesh_table import mesh_option
from shardwright.planner.units import human_bytes, human_time

WIDTH, HEIGHT, MARGIN = 640, 300, 24
"""Size of the chart in pixels, and the space around its dots."""
LETTER, LINE = 6.5, 14
"""Most pixels of a letter, and of a line of text."""


@dataclass(frozen=True)
class Dot:
    """A mesh: its place in pixels, its label and where that goes, and the figures as text."""

    x: float
    y: float
    label: str
    label_y: float
    left: bool
    kind: str
    told: str


@dataclass(frozen=True)
class MeshChart:
    """Dots on logarithmic scales.

    Attributes:
        dots: The meshes.
        frontier: The points of a line through the meshes that no other beats in time and bytes.
        limit: Where the memory of a rank ends, in pixels; None if that is out of the chart.
    """

    dots: list[Dot]
    frontier: str
    limit: float | None


def mesh_chart(plan: Plan, limit: int | None) -> MeshChart | None:
    """Return the chart of the meshes with a plan; None if there are fewer than two.

    Args:
        plan: The plan.
        limit: Bytes that a rank may hold.
    """
    shown = [choice for choice in plan.meshes if choice.time_ns and choice.memory]
    if len(shown) < 2:
        return None
    points = [(choice.memory or 1, choice.time_ns or 1) for choice in shown]
    across = _scale([size for size, _ in points], WIDTH)
    down = _scale([time for _, time in points], HEIGHT)
    places = [(across(size), HEIGHT - down(time)) for size, time in points]
    best = [i for i, point in enumerate(points) if not _beaten(point, points)]
    line = sorted(places[i] for i in best)
    inside = limit is not None and 0 <= across(limit) <= WIDTH
    return MeshChart(
        _labelled(shown, places, best),
        " ".join(f"{x:.1f},{y:.1f}" for x, y in line),
        across(limit) if limit is not None and inside else None,
    )


def _scale(values: Sequence[int], length: int) -> Callable[[int], float]:
    """Return the function that places a value between the margins of a logarithmic axis."""
    low, high = math.log(min(values)), math.log(max(values))
    span = max(high - low, 1e-9)
    return lambda value: MARGIN + (math.log(value) - low) / span * (length - 2 * MARGIN)


def _beaten(point: tuple[int, int], points: Sequence[tuple[int, int]]) -> bool:
    """Whether another point is as good in both figures and better in one."""
    return any(o != point and o[0] <= point[0] and o[1] <= point[1] for o in points)


def _labelled(
    shown: Sequence[MeshChoice], places: Sequence[tuple[float, float]], best: Sequence[int]
) -> list[Dot]:
    """Return the dots with labels that do not cover each other."""
    taken: list[tuple[float, float, float]] = []
    dots = []
    for i, (choice, (x, y)) in enumerate(zip(shown, places, strict=True)):
        label = mesh_option(choice)
        wide = len(label) * LETTER
        left = x + wide + 12 > WIDTH
        start = x - wide - 10 if left else x + 10
        at = y + 4
        while any(abs(at - b) < LINE and start < e and s < start + wide for s, e, b in taken):
            at += LINE
        taken.append((start, start + wide, at))
        kind = "chosen" if i == 0 else "misfit" if not choice.fits else "other"
        figures = f"{human_time(choice.time_ns or 0)}, {human_bytes(choice.memory or 0)} on a rank"
        best_word = "; no mesh beats it in both" if i in best else ""
        told = f"{label}: {figures}{best_word}"
        dots.append(Dot(x, y, label, at, left, kind, told))
    return dots
