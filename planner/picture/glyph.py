"""A weight as a small sheet, striped by the ranks that hold its rows or columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from markupsafe import Markup

from shardwright.planner.contract.dims import is_split
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.picture.cells import Cell, Striped, striped
from shardwright.planner.picture.palette import WHOLE, Palette
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


def glyph(weight: Weight, palette: Palette, x: float, y: float, size: float) -> Markup:
    """The sheet of a weight, `size` wide and high."""
    down, across = stripes(weight, palette.ranks)
    parts = [tag("rect", x=x, y=y, width=size, height=size, fill=WHOLE)]
    few = down is None or len(down.cells) <= MOST or across is not None
    for row, column in crossed(down, across) if few else ():
        top, high = extent(down, row, size)
        left, wide = extent(across, column, size)
        parts.append(
            tag("rect", x=x + left, y=y + top, width=wide, height=high,
                fill=palette.fill(shared(row, column)))
        )  # fmt: skip
    parts.append(tag("rect", x=x, y=y, width=size, height=size, class_="frame"))
    return tag("g", parts, class_="glyph split" if weight.is_split else "glyph")


def crossed(
    down: Striped | None, across: Striped | None
) -> Iterator[tuple[Cell | None, Cell | None]]:
    """All cells of a sheet, by rows; None for a side that is not split; nothing if none is."""
    if down or across:
        yield from product(down.cells if down else (None,), across.cells if across else (None,))


def shared(row: Cell | None, column: Cell | None) -> tuple[int, ...]:
    """The ranks that hold a cell."""
    if row is None or column is None:
        cell = row or column
        return cell.ranks if cell else ()
    return tuple(r for r in row.ranks if r in column.ranks)


def extent(side: Striped | None, cell: Cell | None, length: float) -> tuple[float, float]:
    """Where a cell begins on a side so long, and its own length."""
    if side is None or cell is None:
        return 0.0, length
    return length * cell.start / side.size, length * (cell.stop - cell.start) / side.size
