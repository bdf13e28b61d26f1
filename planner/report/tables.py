"""Tables on a terminal, or as plain text whose names are never broken."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table

WIDTH = 100
"""Columns of plain text, if names and numbers need no more."""
LONG = 40
"""Longer text is not repeated from row to row."""


def show(part: RenderableType) -> None:
    """Print on stdout: on a terminal in its width and with colours, else as plain text."""
    console = Console(highlight=False)
    if console.is_terminal:
        _print(console, part, console.width)
    else:
        console.file.write(plain(part))


def plain(part: RenderableType) -> str:
    """Text without colours, about 100 columns wide, no blanks at the ends of lines."""
    out = io.StringIO()
    _print(Console(file=out, highlight=False, color_system=None), part, WIDTH)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _print(console: Console, part: RenderableType, width: int) -> None:
    """Print in so many columns, or in as many as columns that are not wrapped need."""
    wide = console.options.update(width=10 * WIDTH)
    console.width = max(width, Measurement.get(console, wide, part).minimum)
    console.print(part, soft_wrap=False)


def name(heading: str) -> Column:
    """A column of names, which are never broken."""
    return Column(heading, no_wrap=True)


def number(heading: str) -> Column:
    """A column of numbers."""
    return Column(heading, no_wrap=True, justify="right")


def words(heading: str) -> Column:
    """A column of text that is wrapped."""
    return Column(heading, overflow="fold")


def table(*columns: Column) -> Table:
    """A table with headings and without lines."""
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def facts() -> Table:
    """A table of two columns: what, and its value."""
    label = Column(style="dim", no_wrap=True)
    return Table.grid(label, Column(overflow="fold"), padding=(0, 2))


def once(text: str, before: str) -> str:
    """The text of a cell below one that says `before`: long text is not repeated."""
    return "(as above)" if text == before and len(text) > LONG else text
