"""Measures which solvers prove plans of published models, and how long that takes.

    python -m benchmarks.provers                       all models, tp 2, 4, 8 and 16
    python -m benchmarks.provers llama-1b --tp 8       one
    python -m benchmarks.provers --alone               and by the CP-SAT model alone

Each solver is timed on the problem as plans are made: presolved, with a plan to start from. Alone
is the unreduced model, an integer for each axis of each tensor, without a hint or a bound from
elsewhere. Exits with 1 if anything is not proven, or another plan is found.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from benchmarks.planning import numbers
from shardwright.planner.contract.plan_figures import ObjectiveName

SOLVERS = ("cpsat", "backtracking")


def measure(
    name: str, tp: int, objective: ObjectiveName, alone: bool, limit: float
) -> tuple[list[str], bool]:
    """Return a row of the table in processor seconds, and whether all agree and are proven."""
    from benchmarks.planning_models import MODELS
    from shardwright.planner.prepare import prepare
    from shardwright.planner.problem.objective import question
    from shardwright.planner.search.ladder import SOLVING, climb
    from shardwright.planner.search.search_state import start
    from shardwright.planner.search.solution import SolverOptions
    from shardwright.planner.solvers import cpsat
    from shardwright.planner.stages import watch

    task = prepare(MODELS[name].config(), tp)
    row, good, plans = [name, str(tp)], True, set()
    found: Any = None
    for solver in SOLVERS:
        with watch(time.process_time) as stages:
            found = climb(start(task, SolverOptions(solver, objective=objective)), SOLVING)
        report = found.solution.report
        good &= report.proved_by == solver
        plans.add(found.solution.optimum.assignment)
        mark = "" if report.proved_by == solver else f" ({report.status})"
        row.append(f"{stages.seconds['solve']:.2f}{mark}")
    if alone:
        optimum = found.solution.optimum
        problem = found.formulation.network.problem
        asked = question(problem, optimum.byte_price, bool(optimum.caps))
        begun = time.process_time()
        result = cpsat.solve(asked, 0, optimum.caps, None, limit)
        plans.add(result.assignment)
        good &= result.status == "optimal"
        integers = sum(map(len, problem.parts))
        row += [f"{integers:,}", f"{time.process_time() - begun:.2f}", result.status]
    same = len(plans) == 1
    return [*row, "" if same else "differ"], good and same


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", "sizes", default="2,4,8,16", callback=numbers, help="Numbers of ranks.")
@click.option("--objective", type=click.Choice(get_args(ObjectiveName)), default="time",
              show_default=True, help="What is to be least.")  # fmt: skip
@click.option("--alone", is_flag=True, help="Prove each by the model alone, too.")
@click.option("--limit", type=float, default=300.0, help="Seconds for one model alone.")
def main(
    names: tuple[str, ...], sizes: list[int], objective: Any, alone: bool, limit: float
) -> None:
    """Compare the provers on published models."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from benchmarks.planning_models import MODELS

    unknown = sorted(set(names) - MODELS.keys())
    if unknown:
        raise click.UsageError(f"no model {', '.join(unknown)}; known: {', '.join(MODELS)}")
    table = Table(title="seconds of processor time to solve", title_justify="left")
    more = ("INTEGERS", "ALONE", "STATUS") if alone else ()
    for title in ("MODEL", "TP", *(s.upper() for s in SOLVERS), *more, "PLANS"):
        table.add_column(title, justify="left" if title in ("MODEL", "STATUS") else "right")
    failed = 0
    for name in [n for n in MODELS if not names or n in names]:
        for tp in sizes:
            row, good = measure(name, tp, objective, alone, limit)
            failed += not good
            table.add_row(*row)
            print(*row, file=sys.stderr, flush=True)
    Console(width=120).print(table)
    print(f"{table.row_count - failed} of {table.row_count} proven by all, with one plan each")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
