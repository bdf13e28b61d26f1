"""Does `tune` find the fastest of the plans that it times? Ten small models on two CPU ranks.

    python -m benchmarks.tuned --json FILE     all
    python -m benchmarks.tuned llama gpt2      some

Each model is tuned, which is timed. Then the same plans are timed by a second tuning, which knows
nothing of the first: what the first kept is compared with the fastest of the second. Exits with 1
if it is more than 2 % slower for more than one model in ten, or a tuning takes three minutes. Needs
two idle cores.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.links_rank import MODELS, config
from shardwright.planner.contract.files import write_atomically
from shardwright.planner.contract.plan_file import Plan

WITHIN, SECONDS = 1.02, 180
"""Most time of the plan that was kept, in shares of the fastest, and of a tuning in seconds."""


def measure(name: str, phase: str, batch: int, seq: int) -> dict[str, Any]:
    """Tune a model twice; return how the plan that the first kept does in the second."""
    import shardwright

    plan = shardwright.plan(
        config(name), 2, phase=phase, batch=batch, seq=seq, device="cpu-gloo", dtype="float32"
    )
    began = time.monotonic()
    kept = shardwright.tune(plan, config(name))
    seconds = time.monotonic() - began
    again = shardwright.tune(plan, config(name))
    shares = {_key(plan): 1.0} | {_named(t.mesh, t.pins): t.share for t in again.trials}
    best = min(shares.values())
    return {
        "name": name,
        "plans": 1 + len(kept.trials),
        "seconds": round(seconds, 1),
        "changed": _key(kept) != _key(plan),
        "kept": round(shares[_key(kept)], 4),
        "best": round(best, 4),
        "slower": round(shares[_key(kept)] / best, 4),
    }


def _key(plan: Plan) -> str:
    return _named(plan.mesh, plan.pins)


def _named(mesh: dict[str, int], pins: dict[str, str]) -> str:
    return json.dumps([mesh, pins], sort_keys=True)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--phase", default="prefill", help="What is timed.")
@click.option("--batch", default=8)
@click.option("--seq", default=128)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(names: tuple[str, ...], phase: str, batch: int, seq: int, path: Path | None) -> None:
    """Tune small models, and time what was kept beside the others once more."""
    console, rows = Console(stderr=True), []
    for name in track(names or MODELS, "models", console=console, disable=not console.is_terminal):
        rows.append(measure(name, phase, batch, seq))
        if path:
            write_atomically(path, json.dumps({"phase": phase, "rows": rows}, indent=1) + "\n")
    table = Table(title=f"tuned, {phase} of {batch} x {seq} on 2 CPU ranks")
    for title in rows[0]:
        table.add_column(title, justify="left" if title == "name" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    worse = [row for row in rows if row["slower"] > WITHIN]
    late = [row for row in rows if row["seconds"] > SECONDS]
    sys.exit(len(worse) > len(rows) // 10 or bool(late))


if __name__ == "__main__":
    main()
