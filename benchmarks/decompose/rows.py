"""The rows of limits that can be passed: all that a solver need look at.

What all values of a variable take is taken from the bound. A row that is not passed whatever is
chosen goes, and so does one whose users all take of a neighbour of no larger bound too.
"""

from __future__ import annotations

import numpy as np

from benchmarks.decompose.network import Array, Spans


def scarce(limits: Spans) -> tuple[Spans, Array]:
    """The same limits in fewer rows and spans, and the rows that are left.

    Bounds may be negative: then nothing fits.
    """
    least = np.array([w.min() for w in limits.weights])
    bounds = limits.bounds - limits.spread(least)
    weights = [w - low for w, low in zip(limits.weights, least.tolist(), strict=True)]
    most = limits.spread(np.array([w.max() for w in weights]))
    spread = np.array([w.max() > 0 for w in weights], dtype=bool)
    rows = _widest(limits, bounds, np.flatnonzero(most > bounds), spread)
    first, last = np.searchsorted(rows, limits.first), np.searchsorted(rows, limits.last)
    spans: dict[tuple[int, int, int], Array] = {}
    for k in np.flatnonzero(spread & (first < last)).tolist():
        key = int(limits.variable[k]), int(first[k]), int(last[k])
        spans[key] = spans[key] + weights[k] if key in spans else weights[k]
    keys = np.array(list(spans), dtype=int).reshape(-1, 3)
    weights = list(spans.values())
    units = limits.units[rows]
    return Spans(keys[:, 0], keys[:, 1], keys[:, 2], weights, bounds[rows], units), rows


def _widest(limits: Spans, bounds: Array, rows: Array, spread: Array) -> Array:
    """Of rows, those whose users are not all users of the next or the last one that is kept."""
    begins = np.bincount(limits.first[spread], minlength=len(bounds) + 1).cumsum()
    ends = np.bincount(limits.last[spread], minlength=len(bounds) + 1).cumsum()
    kept: list[int] = []
    for row in rows.tolist():
        while kept and ends[row] == ends[kept[-1]] and bounds[row] <= bounds[kept[-1]]:
            kept.pop()  # whoever takes of that one takes of this one
        if kept and begins[row] == begins[kept[-1]] and bounds[kept[-1]] <= bounds[row]:
            continue
        kept.append(row)
    return np.array(kept, dtype=int)
