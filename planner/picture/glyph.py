"""A weight as a small sheet, striped by the ranks that hold its rows or columns."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from shardwright.planner.contract.dims import is_split
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.picture.cells import Striped, striped
from shardwright.planner.picture.palette import WHOLE
from shardwright.planner.picture.svg import tag
from shardwright.planner.picture.weights import Weight

MOST = 64
"""Stripes that can still be seen."""


def sheet(weight: Weight) -> tuple[int, int]:
    """The two dims of a weight that are drawn, down and across: those split, else the last."""
    dims = weight.placement.dims
    last = list(range(len(dims)))[-2:]
    split = [i for i, dim in enumerate(dims) if is_split(dim)][:2]
    shown = sorted({*split, *last[::-1][: 2 - len(split)]}) if len(dims) > 1 else [0]
    for i in last:
        if len(shown) < min(len(dims), 2) and i not in shown:
            shown = sorted([*shown, i])
    return shown[0], shown[-1]


def stripes(weight: Weight, ranks: list[Coords]) -> tuple[Striped | None, Striped | None]:
    """Who holds what of the dim that is drawn down, and of that across; None of one not split."""
    down, across = sheet(weight)
    dims = weight.placement.dims
    return (
        striped(dims[down], ranks) if is_split(dims[down]) else None,
        striped(dims[across], ranks) if across != down and is_split(dims[across]) else None,
    )


def fill(holders: Sequence[int], colours: list[str]) -> str:
    """The colour of what these ranks hold: that of the first, or of what all hold."""
    return WHOLE if len(holders) == len(colours) > 1 or not holders else colours[holders[0]]


def glyph(
    weight: Weight, ranks: list[Coords], colours: list[str], x: float, y: float, size: float
) -> Markup:
    """The sheet of a weight, `size` wide and high."""
    down, across = stripes(weight, ranks)
    parts = [tag("rect", x=x, y=y, width=size, height=size, fill=WHOLE)]
    for row in down.cells if down else ():
        if across is None and down and len(down.cells) > MOST:
            break
        for column in across.cells if across else (None,):
            holders = [r for r in row.ranks if column is None or r in column.ranks]
            parts.append(_cell(down, row, across, column, holders, colours, x, y, size))
    if down is None:
        for column in across.cells if across else ():
            parts.append(_cell(None, None, across, column, column.ranks, colours, x, y, size))
    parts.append(tag("rect", x=x, y=y, width=size, height=size, class_="frame"))
    return tag("g", parts, class_="glyph split" if weight.is_split else "glyph")


def _cell(down, row, across, column, holders, colours, x, y, size):  # noqa: ANN001, ANN202
    top = size * row.start / down.size if row else 0.0
    high = size * (row.stop - row.start) / down.size if row else size
    left = size * column.start / across.size if column else 0.0
    wide = size * (column.stop - column.start) / across.size if column else size
    return tag(
        "rect", x=x + left, y=y + top, width=wide, height=high, fill=fill(holders, colours)
    )
