"""Latency and speed of a collective, from its times for several sizes.

They come from a straight line through the times: the line with the least sum of squared relative
errors, since a small collective matters as much as a large one.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.planner.devices.device import SECOND, Link, sent


def link(kind: str, points: Sequence[tuple[int, int]], ranks: int) -> Link:
    """Return latency and speed of a kind of collective, from (bytes, nanoseconds)."""
    latency, slope = fit(points)
    moved = sent(kind, SECOND, ranks) / ranks / SECOND  # bytes sent per input byte
    return Link(latency_ns=round(latency), bytes_per_s=max(round(moved / slope * SECOND), 1))


def fit(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Fit a line to (bytes, nanoseconds); return latency, at least 0, and time per byte, above 0.

    Minimizes squared relative errors: each point weighs 1 / its time squared. Where times do not
    grow with bytes, so that what a byte takes was lost in other times, it is taken to be no more
    than the longest time over the most bytes.
    """
    w = [1 / max(t, 1) ** 2 for _, t in points]
    n = sum(w)
    x = sum(a * s for a, (s, _) in zip(w, points, strict=True)) / n
    y = sum(a * t for a, (_, t) in zip(w, points, strict=True)) / n
    up = sum(a * (s - x) * (t - y) for a, (s, t) in zip(w, points, strict=True))
    across = sum(a * (s - x) ** 2 for a, (s, _) in zip(w, points, strict=True))
    slope = up / across if across else 0.0
    if slope <= 0:
        return y, max(t for _, t in points) / max(s for s, _ in points)
    if y - slope * x >= 0:
        return y - slope * x, slope
    square = sum(a * s * s for a, (s, _) in zip(w, points, strict=True))
    return 0.0, sum(a * s * t for a, (s, t) in zip(w, points, strict=True)) / square
