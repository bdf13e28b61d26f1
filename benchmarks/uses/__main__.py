"""Search for what is silently wrong: models times uses, split and whole, on real gloo ranks.

    python -m benchmarks.uses                              all models, all uses, on 2 ranks
    python -m benchmarks.uses --tp 3 causal/llama          one model, on 3
    python -m benchmarks.uses --use hidden_states          one use of all models
    python -m benchmarks.uses --threads                    ranks as threads: half the time

Each use runs on the whole model and on the split one; outputs, and gradients of all parameters, are
compared. A use that the whole model cannot do is not counted. Prints what is not equal and a
count of each verdict; `--json FILE` writes all rows, beside those of other models and uses that are
in it. Exits with 1 if anything is wrong, raises something else than our errors, or is refused
that never should be.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.uses.case import VERDICTS, compared
from benchmarks.uses.models import names
from benchmarks.uses.subject import USES
from benchmarks.uses.threads import by_threads
from benchmarks.zoo import write
from benchmarks.zoo_ranks import Job, sweep
from shardwright.planner.contract.files import write_atomically

BAD = ("denied", "wrong", "raw")


@click.command()
@click.argument("models", nargs=-1)
@click.option("--use", "uses", multiple=True, help="Only these.")
@click.option("--tp", default=2, help="Ranks.")
@click.option("--threads", is_flag=True, help="Ranks as threads, without what draws or compiles.")
@click.option("--groups", default=1, help="Models compared at once.")
@click.option("--part", default="1/1", help="K/N: the Kth of N parts of the models.")
@click.option("--limit", default=120.0, help="Seconds for a use of a model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(
    models: tuple[str, ...],
    uses: tuple[str, ...],
    tp: int,
    threads: bool,
    groups: int,
    part: str,
    limit: float,
    path: Path | None,
) -> None:
    """Run uses of split models and compare them with the whole ones."""
    k, n = map(int, part.split("/"))
    chosen = (models or tuple(names()))[k - 1 :: n]
    if unknown := {*uses} - USES.keys():
        raise click.UsageError(f"no such use: {', '.join(sorted(unknown))}")
    if unknown := {*models} - {*names()}:
        raise click.UsageError(f"no such model: {', '.join(sorted(unknown))}; {', '.join(names())}")
    asked = [use for use in uses or USES if not (threads and USES[use].own_process)]
    jobs = [(model, use) for model in chosen for use in asked]
    console, found = Console(stderr=True), _before(path, jobs, tp)
    with TemporaryDirectory() as plans:
        case = partial(compared, plans)
        rows = by_threads(jobs, tp, case) if threads else sweep(jobs, tp, case, groups, limit)
        for row in track(rows, "uses", len(jobs), console=console, disable=not console.is_terminal):
            if "error" in row:  # a rank ended, or all wait for each other
                row |= {"tp": tp, "verdict": "raw", "text": row.pop("error")}
            row.pop("raised", None)
            found.append(row)
            if path and (row["name"] == jobs[-1][1] or len(found) % 50 == 0):
                write(path, {"rows": found})
    text = summary(found)
    if path:
        write(path, {"rows": found})
        write_atomically(path.with_suffix(".txt"), text + "\n")
    Console(width=150).print(report(found))
    print(text)
    bad = [row for row in found if row["verdict"] in BAD]
    sys.exit(1 if bad else 0)


def _before(path: Path | None, jobs: list[Job], tp: int) -> list[dict[str, Any]]:
    """The rows of an earlier run in that file, but for those that are made anew."""
    rows = json.loads(path.read_text())["rows"] if path and path.exists() else []
    return [row for row in rows if (row["kind"], row["name"]) not in jobs or row["tp"] != tp]


def report(rows: list[dict[str, Any]]) -> Table:
    """What is neither equal nor unfit, a row for each use and text."""
    out = Table(title="uses that are not equal", title_justify="left")
    for title in ("VERDICT", "USE", "MODELS", "TEXT"):
        out.add_column(title)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["verdict"] not in ("equal", "unfit"):
            text = row["text"].splitlines()[0] if row["text"] else ""
            groups.setdefault((row["verdict"], row["name"], text[:110]), []).append(row["kind"])
    order = sorted(groups.items(), key=lambda g: (-VERDICTS.index(g[0][0]), g[0][1]))
    for (verdict, use, text), models in order:
        who = ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")
        out.add_row(verdict, use, who, text)
    return out


def summary(rows: list[dict[str, Any]]) -> str:
    """How many of each verdict, by group of models, and what is refused."""
    models, uses = {r["kind"] for r in rows}, {r["name"] for r in rows}
    lines = [f"{len(models)} models x {len(uses)} uses"]
    for group in dict.fromkeys(r["kind"].partition("/")[0] for r in rows):
        mine = [r for r in rows if r["kind"].partition("/")[0] == group]
        lines.append(f"{group:15}{len({r['kind'] for r in mine}):3} models: {_counts(mine)}")
    lines.append(f"{'all':15}{len(models):3} models: {_counts(rows)}")
    refused = Counter(r["name"] for r in rows if r["verdict"] == "refused")
    lines += [f"  refused {n:4} x {use}" for use, n in refused.most_common()]
    return "\n".join(lines)


def _counts(rows: list[dict[str, Any]]) -> str:
    count = Counter(row["verdict"] for row in rows)
    return ", ".join(f"{count[v]} {v}" for v in VERDICTS if count[v])


if __name__ == "__main__":
    main()
