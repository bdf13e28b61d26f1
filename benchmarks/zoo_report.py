"""Formats the results of the sweep for people: a table and a summary."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from benchmarks.zoo_case import FIGURES, passed
from benchmarks.zoo_peer import Peers, Row, against, peers, summary

ENOUGH = 0.9
"""Share of the block weights that should be split."""


def report(rows: list[Row], tp: int) -> str:
    """Return the table, and a line for each topic of the sweep."""
    console = Console(width=130, record=True, file=io.StringIO())
    console.print(table(rows, tp, peers(tp)))
    return "\n".join([console.export_text().rstrip(), *facts(rows), *summary(rows, peers(tp))])


def table(rows: list[Row], tp: int, found: Peers) -> Table:
    """Format the results; a star marks where transformers' plan replicates what ours splits."""
    out = Table(title=f"whole and split models compared, tp={tp}", title_justify="left")
    out.add_column("MODEL")
    for title in ("ALLOWED", *FIGURES.values(), "SPLIT", "FORWARD", "PEER", "BACKWARD"):
        out.add_column(title, justify="right")
    out.add_column("")
    for row in rows:
        if "error" in row:
            out.add_row(row["name"], *[""] * (len(FIGURES) + 5), row["error"])
            continue
        figures = (row[key] for key in ("tolerance", *FIGURES))
        out.add_row(
            row["name"],
            *("-" if f is None else f"{f:.0e}" for f in figures),
            f"{row['split']:.0%}",
            str(sum(row["forward"].values())),
            theirs.text if (theirs := against(row, found)) else "-",
            str(sum(row["backward"].values())),
            "ok" if passed(row) else "DIFFERS",
        )
    return out


FACTS: dict[str, Callable[[Row], bool]] = {
    "equal to the whole model": passed,
    f"with {ENOUGH:.0%} of block weights split": lambda row: row["split"] >= ENOUGH,
    "with the forward collectives predicted": lambda row: _as_predicted(row, "forward"),
    "with the backward collectives predicted": lambda row: (
        row["gradients"] is None or _as_predicted(row, "backward")
    ),
}


def facts(rows: list[Row]) -> list[str]:
    """Say how many are equal, split and predicted, of each kind, and which are not."""
    out = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        for what, holds in FACTS.items():
            bad = [r["name"] for r in mine if "error" in r or not holds(r)]
            text = f"{kind}: {len(mine) - len(bad)} of {len(mine)} {what}"
            out.append(text + (f"; not: {', '.join(bad)}" if bad else ""))
    opaque = Counter(op for row in rows for op in row.get("opaque", ()))
    if opaque:
        found = ", ".join(f"{op} ({n})" for op, n in sorted(opaque.items()))
        out.append(f"without a rule, and in how many architectures: {found}")
    return out


def _as_predicted(row: Row, phase: str) -> bool:
    return row["predicted"][phase] == row[phase]
