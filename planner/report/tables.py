"""Prints tables on a terminal, or as plain text in which names are never broken."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table

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
    """Print in `width` columns, or in as many as the columns that are not wrapped need."""
    wide = console.options.update(width=10 * WIDTH)
    console.width = max(width, Measurement.get(console, wide, part).minimum)
    console.print(part, soft_wrap=False)


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


def once(text: str, before: str) -> str:
    """Return `text`, or "(as above)" if the cell above has the same long text."""
    return "(as above)" if text == before and len(text) > LONG else text
