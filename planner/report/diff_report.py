"""Differences of plans as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from shardwright.planner.report.diff import Difference
from shardwright.planner.report.report import once

TITLES = {
    "plan": "WHAT FOR",
    "cost": "COST",
    "pin": "PIN",
    "placement": "PARAMETER",
    "collective": "COLLECTIVES AT",
    "number": "LOCAL NUMBER",
    "replicated": "WHY REPLICATED",
    "opaque": "OP WITHOUT A RULE",
}
LONGEST = 50
"""Columns that names have at most."""


def diff_report(found: Sequence[Difference], first: str, second: str) -> RenderableType:
    """A table of three columns for each kind of difference; `first` and `second` name the plans."""
    if not found:
        return Text("The plans are equal.")
    longest = max(len(row.name) for row in found) + 2
    table = Table(
        Column("", overflow="fold", width=min(longest, LONGEST)), Column("FIRST", overflow="fold"),
        Column("SECOND", overflow="fold"),
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold",
    )  # fmt: skip
    for kind, rows in groupby(found, key=lambda d: d.kind):
        table.add_row(Text(TITLES[kind], style="bold cyan"))
        before = ("", "")
        for row in rows:
            said = once(row.first, before[0]), once(row.second, before[1])
            table.add_row(f"  {row.name}", *said)
            before = row.first, row.second
    return Group(Text(f"first   {first}\nsecond  {second}\n"), table)
