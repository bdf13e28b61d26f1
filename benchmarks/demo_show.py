"""Prints the results of the demo: one table per model, one line per check."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.demo_outcome import Check, Outcome

PHASES = {"forward": "FORWARD", "decode": "DECODE STEP"}

console = Console(highlight=False, soft_wrap=True)


def opening(ranks: int) -> None:
    """Say what is about to happen."""
    import torch
    import transformers

    console.print(
        f"{ranks} ranks on this machine's CPU: torchrun, gloo, float32; "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def outcome(title: str, found: Outcome) -> None:
    """Print all results for one model."""
    solver, files = found.plan.solver, "file" if found.files == 1 else "files"
    console.print()
    console.print(
        f"[bold]{title}[/bold]: {found.parameters / 1e6:.1f} M parameters in {found.files} {files}"
    )
    proof = "proven optimal" if solver.status == "optimal" else "best found, not proven"
    console.print(f"planned in {found.plan_seconds:.1f} s by {solver.name}, {proof}")
    console.print(_table(found))
    console.print(f"collectives of a forward: {_kinds(found.ranks[0]['forward'])}")
    for check in found.checks:
        console.print(_line(check))
    if found.remark:
        console.print(found.remark, style="dim", markup=False)


def _table(found: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    phases = [phase for phase in PHASES if phase in found.ranks[0]]
    for head in ("RANK", "HELD", "OF REPLICATED", "READ", *(PHASES[phase] for phase in phases)):
        table.add_column(head, justify="right", no_wrap=True)
    for rank in found.ranks:
        table.add_row(
            str(rank["rank"]),
            _size(rank["held"]),
            f"{100 * rank['held'] / found.plan.predicted.unsharded_bytes:.1f} %",
            _size(rank["read"]),
            *(_calls(rank[phase]) for phase in phases),
        )
    return table


def _calls(figures: dict[str, Any]) -> str:
    return f"{sum(figures['kinds'].values())} calls, {_size(figures['bytes'])}"


def _kinds(figures: dict[str, Any]) -> str:
    return " + ".join(f"{n} {k.replace('_', '-')}" for k, n in figures["kinds"].items()) or "none"


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _line(check: Check) -> Text:
    mark, style = ("ok", "green") if check.passed else ("DIFFERS", "bold red")
    line = Text.assemble((f"{mark}  ", style), f"{check.what}: {check.difference:.2g}")
    if check.allowed:
        line.append(f" (allowed: {check.allowed:g})")
    return line


def closing(checks: int, failed: int, start: float, kept: Path | None, drawn: Path) -> None:
    """Print the summary."""
    console.print()
    seconds = f"{time.perf_counter() - start:.0f} s"
    if failed:
        console.print(f"[bold red]{failed} of {checks} checks failed[/bold red], after {seconds}")
    else:
        console.print(f"[bold green]All {checks} checks passed[/bold green], after {seconds}")
    console.print(f"The plans are drawn in {drawn}: open it in a browser")
    if kept:
        console.print(f"Checkpoints, plans and results are in {kept}")
