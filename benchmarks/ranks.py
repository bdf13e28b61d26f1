"""Tests heads, vocabularies and sequences that ranks do not divide, on real gloo ranks.

    python -m benchmarks.ranks             every case, on 2, 4 and 8 ranks
    python -m benchmarks.ranks --tp 4      those on 4

Logits, all gradients and a decode step of the split model are compared with the unsharded model's,
in float64, and the counted collectives with the predicted ones. If the sequence is split, the bytes
that autograd saves on a rank are measured with and without the split. Prints a table, writes it
with `--json FILE`, and exits with 1 if anything differs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.ranks_case import compared, jobs, passed
from benchmarks.zoo import write
from benchmarks.zoo_ranks import sweep

TITLES = ("TP", "ALLOWED", "LOGITS", "GRADS", "DECODE", "FORWARD", "BACKWARD", "KEPT", "WITHOUT")


def table(rows: list[dict[str, Any]]) -> Table:
    """Format the results for people."""
    out = Table(title="whole and split models compared", title_justify="left")
    out.add_column("CASE")
    for title in (*TITLES, ""):
        out.add_column(title, justify="right" if title else "left")
    for row in rows:
        if "error" in row:
            out.add_row(row["name"], *[""] * len(TITLES), row["error"])
            continue
        figures = (row[key] for key in ("tolerance", "logits", "gradients", "decode"))
        out.add_row(
            row["name"],
            str(row["tp"]),
            *("-" if f is None else f"{f:.0e}" for f in figures),
            str(sum(row["forward"].values())),
            str(sum(row["backward"].values())),
            *(f"{row[k] / 1000:.1f} kB" if k in row else "" for k in ("kept", "kept_without")),
            "ok" if passed(row) else "DIFFERS",
        )
    return out


@click.command()
@click.option("--tp", "sizes", type=int, multiple=True, default=(2, 4, 8), help="Ranks.")
@click.option("--limit", default=600.0, help="Seconds for a case.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(sizes: tuple[int, ...], limit: float, path: Path | None) -> None:
    """Compare split models with whole ones where ranks do not divide them."""
    rows: list[dict[str, Any]] = []
    console = Console(stderr=True)
    for tp in sizes:
        todo = jobs(tp)
        found = sweep(todo, tp, compared, 1, limit)
        words = f"{tp} ranks"
        for row in track(found, words, len(todo), console=console, disable=not console.is_terminal):
            rows.append(row)
            if path:
                write(path, {"rows": rows})
    Console(width=130).print(table(rows))
    failed = [r["name"] for r in rows if not passed(r)]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} equal"
        + (f"; not: {', '.join(failed)}" if failed else "")
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
