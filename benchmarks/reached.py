"""Counts, for each folder, the statements that plans and runs of architectures reach.

    python -m benchmarks.reached --json FILE             plan and run all of them on 2 ranks
    python -m benchmarks.reached --json FILE causal/llama

It says what each part of the code serves: all models, a few or none. What none reaches is for other
uses (commands, exports, training over several ranks, servers) or for errors. Needs Python 3.12,
whose `sys.monitoring` reports each line once and costs next to nothing. Models that are in FILE
are not run again.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.compare import compare
from benchmarks.zoo import write
from benchmarks.zoo_case import case
from shardwright.errors import ShardwrightError
from tests import planning, zoo
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
PARTS = ("planner", "runtime", "rules")
FEW = 0.05
"""Share of the models that are few."""
SILENT = (ast.Pass, ast.Global, ast.Nonlocal)
"""Statements that Python reports no line for."""


@contextmanager
def lines_reached() -> Iterator[dict[str, set[int]]]:
    """Yield file -> line numbers that ran, filled in on leaving."""
    found: dict[str, set[int]] = defaultdict(set)
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    home = str(ROOT)

    def reached(code: Any, line: int) -> Any:
        if code.co_filename.startswith(home):
            found[code.co_filename].add(line)
        return monitoring.DISABLE

    tool, event = monitoring.COVERAGE_ID, monitoring.events.LINE
    monitoring.use_tool_id(tool, "reached")
    monitoring.register_callback(tool, event, reached)
    monitoring.restart_events()
    monitoring.set_events(tool, event)
    try:
        yield found
    finally:
        monitoring.free_tool_id(tool)


def statements(file: Path) -> set[int]:
    """The lines of statements in functions; other statements run whenever the file is imported."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = set[int]()
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, functions):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            inside = [s for one in body for s in ast.walk(one) if isinstance(s, ast.stmt)]
            found |= {s.lineno for s in inside if not isinstance(s, SILENT)}
    return found


def run(kind: str, name: str) -> str | None:
    """Plan a model for two ranks and compare it there. Returns why not, if it is refused."""
    one = case(kind, name)
    try:
        plan = planning.proven(one.model, tp=2, kwargs=one.example)
        run_ranks(2, lambda mesh: compare(one.model, one.inputs, plan, mesh, one.expected))
    except ShardwrightError as error:
        return f"{type(error).__name__}: {error}"
    return None


def by_folder(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Folder -> how many statements half of the models, any, few and none of them reach."""
    times: Counter[tuple[str, int]] = Counter()
    for row in rows:
        times.update((file, line) for file, lines in row["lines"].items() for line in lines)
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            for line in statements(path):
                share = times[file, line] / len(rows)
                folder = table["/".join(file.split("/")[:-1][:3])]
                folder["statements"] += 1
                folder["half"] += share >= 0.5
                folder["any"] += share > 0
                folder["few"] += 0 < share < FEW
                folder["none"] += share == 0
    return {folder: dict(counts) for folder, counts in table.items()}


def as_table(found: Mapping[str, Mapping[str, int]], models: int) -> Table:
    """The counts, the largest folder first."""
    table = Table("folder", "statements", "half", "any", "few", "none", title=f"{models} models")
    for folder, counts in sorted(found.items(), key=lambda item: -item[1]["statements"]):
        table.add_row(folder, *(str(counts[c.header]) for c in table.columns[1:]))  # type: ignore[index]
    return table


@click.command()
@click.argument("models", nargs=-1)
@click.option("--json", "path", type=click.Path(path_type=Path), required=True, help="The rows.")
def main(models: tuple[str, ...], path: Path) -> None:
    """Plan and run MODELS (kind/name; by default all of the zoo), and count."""
    if sys.version_info < (3, 12):
        raise click.UsageError("this needs Python 3.12: it counts with sys.monitoring")
    torch.set_num_threads(1)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    there = {row["model"] for row in rows}
    chosen = models or tuple(f"{kind}/{name}" for kind in zoo.KINDS for name in zoo.names(kind))
    todo, console = [m for m in chosen if m not in there], Console(stderr=True)
    for model in track(todo, "models", console=console, disable=not console.is_terminal):
        with lines_reached() as lines:
            refused = run(*model.split("/"))
        inside = {str(Path(f).resolve().relative_to(ROOT)): sorted(n) for f, n in lines.items()}
        mine = {file: n for file, n in inside.items() if file.startswith(PARTS)}
        rows.append({"model": model, "refused": refused, "lines": mine})
        write(path, {"rows": rows})
    Console().print(as_table(by_folder(rows), len(rows)))


if __name__ == "__main__":
    main()
