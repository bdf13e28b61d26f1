"""Measures planning of published models at full size: time by stage, size, proof, memory.

    python -m benchmarks.planning                          all models, tp 2, 4, 8 and 16
    python -m benchmarks.planning llama-1b --tp 8          one
    python -m benchmarks.planning --layers 2 --json FILE   the first two layers of each

Needs no network, no weights and no GPU. Each model is planned in its own process, after imports.
Of several runs (`--repeat`) the fastest counts. Exits with 1 if a plan is missing or not proven
optimal.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import platform
import queue
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

STAGES = ("read", "trace", "axes", "problem", "solve", "check", "emit", "verify")
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class How:
    """How to plan and measure."""

    layers: int | None
    solver: str | None
    repeat: int
    cpu: bool
    limit: float


def measure(name: str, tp: int, how: How) -> dict[str, Any]:
    """Make one plan; return seconds by stage and the results."""
    import shardwright
    from benchmarks.planning_models import MODELS
    from shardwright.errors import ShardwrightError
    from shardwright.planner.stages import watch

    config = MODELS[name].config(how.layers)
    row: dict[str, Any] = {"model": name, "tp": tp, "layers": config.num_hidden_layers}
    with watch(time.process_time if how.cpu else time.perf_counter) as stages:
        try:
            plan = shardwright.plan(config, tp, solver=how.solver)
        except ShardwrightError as error:
            return row | {"error": f"{type(error).__name__}: {error}"}
    seconds = {stage: round(stages.seconds.get(stage, 0.0), 4) for stage in STAGES}
    objective, bound = plan.solver.objective[0], plan.solver.bound[0]
    forward = [c for c in plan.predicted.collectives if c.phase == "forward"]
    return (
        row
        | stages.figures
        | {
            "seconds": seconds,
            "planning_s": round(sum(seconds.values()) - seconds["verify"], 4),
            "peak_bytes": peak(),
            "solver": plan.solver.name,
            "status": plan.solver.status,
            "gap": (objective - bound) / max(objective, 1),
            "rank_bytes": max(plan.predicted.parameter_bytes),
            "whole_bytes": plan.predicted.unsharded_bytes,
            "collectives": sum(c.count for c in forward),
            "kept_whole": {w.parameter: w.reason for w in plan.replicated},
            "opaque": plan.opaque,
        }
    )


def peak() -> int | None:
    """Return this process's peak memory in bytes so far, if the system tells (Linux)."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def work(name: str, sizes: list[int], how: How, rows: Any) -> None:
    """Plan one model for every number of ranks; runs in a process."""
    import torch

    import shardwright
    from benchmarks.planning_models import MODELS
    from shardwright.planner.trace.model.source import read_source

    torch.set_num_threads(1)
    layer = torch.nn.Linear(8, 8)
    shardwright.plan(layer, 2, args=(torch.zeros(3, 8),))  # for imports at first use
    count = sum(p.numel() for p in read_source(MODELS[name].config()).module.parameters())
    assert count == MODELS[name].parameters, f"{name}: {count:,} parameters, not as published"
    for tp in sizes:
        found = [measure(name, tp, how) for _ in range(how.repeat)]
        rows.put(min(found, key=lambda row: row.get("planning_s", 0.0)))


def each(names: list[str], sizes: list[int], how: How) -> Iterator[dict[str, Any]]:
    """Yield the rows of all models, one process at a time; processes past the limit are ended."""
    context = mp.get_context("spawn")
    for name in names:
        rows = context.Queue()
        process = context.Process(target=work, args=(name, sizes, how, rows))
        process.start()
        for tp in sizes:
            row = _next(rows, process, how.limit * how.repeat)
            late = f"its process failed, or took more than {how.limit:g} s"
            yield row or {"model": name, "tp": tp, "error": late}
            if row is None:
                process.kill()
        process.join()


def _next(rows: Any, process: Any, limit: float) -> dict[str, Any] | None:
    waited = 0.0
    while waited < limit:
        try:
            return rows.get(timeout=1)
        except queue.Empty:
            waited += 1
        if not process.is_alive() and rows.empty():
            return None
    return None


def table(rows: list[dict[str, Any]], cpu: bool) -> Table:
    """Format the rows for people."""
    out = Table(
        title=f"seconds of {'processor time' if cpu else 'planning'}, by stage",
        title_justify="left",
    )
    titles = ["LAYERS", "TP", *(s.upper() for s in STAGES[:-1]), "PLANNING", "VERIFY"]
    for title in ("MODEL", *titles, "VARIABLES", "CONSTRAINTS", "BY", "GAP", "PEAK"):
        out.add_column(title, justify="left" if title in ("MODEL", "BY") else "right")
    for row in rows:
        if "error" in row:
            out.add_row(row["model"], str(row.get("layers", "")), str(row["tp"]))
            continue
        seconds = row["seconds"]
        out.add_row(
            row["model"],
            str(row["layers"]),
            str(row["tp"]),
            *(f"{seconds[s]:.2f}" for s in STAGES[:-1]),
            f"{row['planning_s']:.2f}",
            f"{seconds['verify']:.2f}",
            f"{row['variables']:,} > {row['presolved_variables']:,}",
            f"{row['constraints']:,} > {row['presolved_constraints']:,}",
            f"{row['solver']}",
            f"{row['gap']:.2%}" if row["status"] == "feasible" else "0",
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MEGABYTE:.0f} MiB",
        )
    return out


def write(rows: list[dict[str, Any]], path: Path, repeat: int, cpu: bool) -> None:
    """Write the available rows, and what they were measured with."""
    from shardwright.planner.contract.files import write_atomically

    about = {"cores": os.cpu_count(), "machine": platform.machine(), "repeat": repeat}
    about |= {package: version(package) for package in ("torch", "transformers")}
    about["clock"] = "processor" if cpu else "wall"
    result = {"about": about, "rows": rows}
    write_atomically(path, json.dumps(result, indent=1, sort_keys=True) + "\n")


def numbers(_context: Any, _option: Any, text: str) -> list[int]:
    """Parse integers separated by commas."""
    try:
        found = [int(n) for n in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"'{text}' should be numbers of ranks, as in 2,4,8") from None
    if min(found) < 1:
        raise click.BadParameter("a number of ranks is at least 1")
    return found


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", "sizes", default="2,4,8,16", callback=numbers, help="Numbers of ranks.")
@click.option("--layers", type=click.IntRange(min=1), help="Only the first layers of each.")
@click.option("--solver", help="Name of a solver.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, help="Runs; the fastest counts.")
@click.option("--cpu", is_flag=True, help="Processor time, which other programs do not stretch.")
@click.option("--limit", type=float, default=300.0, help="Seconds for one plan.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(
    names: tuple[str, ...],
    sizes: list[int],
    layers: int | None,
    solver: str | None,
    repeat: int,
    cpu: bool,
    limit: float,
    path: Path | None,
) -> None:
    """Measure planning of published models."""
    from benchmarks.planning_models import MODELS

    unknown = sorted(set(names) - MODELS.keys())
    if unknown:
        raise click.UsageError(f"no model {', '.join(unknown)}; known: {', '.join(MODELS)}")
    chosen = [n for n in MODELS if not names or n in names]
    rows: list[dict[str, Any]] = []
    found = each(chosen, sizes, How(layers, solver, repeat, cpu, limit))
    total = len(chosen) * len(sizes)
    shown = Console(stderr=True)
    for row in track(found, "planning", total, console=shown, disable=not sys.stderr.isatty()):
        rows.append(row)
        if path:
            write(rows, path, repeat, cpu)  # as they come: all of them take minutes
    Console(width=190).print(table(rows, cpu))
    for row in rows:
        if "error" in row:
            print(f"{row['model']} at tp {row['tp']}: {row['error']}")
    proven = sum(row.get("status") == "optimal" for row in rows)
    print(f"{proven} of {len(rows)} planned and proven optimal")
    sys.exit(0 if proven == len(rows) else 1)


if __name__ == "__main__":
    main()
