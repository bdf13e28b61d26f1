"""Prints tables on a terminal, or as plain text in which names are never broken."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

WIDTH = 100
"""Columns of plain text, unless names and numbers need more."""
LONG = 40
"""Text longer than this is not repeated from row to row."""


def show(part: RenderableType) -> None:
    """Print on stdout: in the width and colours of a terminal, and otherwise as plain text."""
    console = Console(highlight=False)
    if console.is_terminal:
        _print(console, part, console.width)
    else:
        console.file.write(plain(part))


def plain(part: RenderableType) -> str:
    """Return text without colours, about 100 columns wide, without trailing blanks."""
    out = io.StringIO()
    _print(Console(file=out, highlight=False, color_system=None), part, WIDTH)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _print(console: Console, part: RenderableType, width: int) -> None:
    """Print in `width` columns, or in as many as are needed to break no name, number or word."""
    wide = console.options.update(width=10 * WIDTH)
    for column in _columns(part):
        cells = [Measurement.get(console, wide, c) for c in (column.header, *column.cells)]
        column.min_width = max(c.maximum if column.no_wrap else c.minimum for c in cells)
    console.width = max(width, Measurement.get(console, wide, part).minimum)
    console.print(part, soft_wrap=False)


def _columns(part: object) -> list[Column]:
    """Return the columns of all tables in a part."""
    if isinstance(part, Table):
        return part.columns
    inside = part.renderables if isinstance(part, Group) else ()
    inside = (part.renderable,) if isinstance(part, Padding) else inside
    return [column for each in inside for column in _columns(each)]


def name(heading: str) -> Column:
    """Return a column of names, which are never broken."""
    return Column(heading, no_wrap=True)


def number(heading: str) -> Column:
    """Return a column of numbers."""
    return Column(heading, no_wrap=True, justify="right")


def words(heading: str) -> Column:
    """Return a column of text that is wrapped."""
    return Column(heading, overflow="fold")


def table(*columns: Column) -> Table:
    """Return a table with headings and without lines."""
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def facts() -> Table:
    """Return a table of two columns: label and value."""
    label = Column(style="dim", no_wrap=True)
    return Table.grid(label, Column(overflow="fold"), padding=(0, 2))


def spaced(parts: Sequence[RenderableType]) -> Group:
    """Return parts with an empty line between each two."""
    return Group(*[line for part in parts for line in (part, Text(""))][:-1])


def once(text: str, before: str) -> str:
    """Return `text`, or "(as above)" if the cell above has the same long text."""
    return "(as above)" if text == before and len(text) > LONG else text
