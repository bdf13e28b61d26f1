"""Compares plans for least time and least memory with transformers' own, for published models.

    python -m benchmarks.objectives                            all models, tp 2, 4, 8, 16 and 32
    python -m benchmarks.objectives llama-8b --tp 32           one
    python -m benchmarks.objectives --json FILE --text FILE    write the rows, and the table

For each model at full size, and for each phase separately, a row has bytes of weights and all
memory of a rank, collectives of a pass, and predicted time. A plan for least time may hold more
bytes, or take more collectives, than transformers' own only if it takes less time. Exceptions are
listed, and the exit status is then 1. Models are on meta: no weights, no network, no GPU. Plans are
proven and checked, but not run on meta. Rows that FILE has already are not made again.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import click

from shardwright.planner.contract.files import write_atomically
from shardwright.planner.contract.plan_figures import ObjectiveName, Prediction

RANKS = (2, 4, 8, 16, 32)
PHASES = ("prefill", "decode", "train")
BATCH, SEQ, DEVICE = 8, 512, "h100-nvlink"
OBJECTIVES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)
Row = dict[str, Any]


@cache
def traced(name: str) -> Any:
    """Trace a model at full size; the trace does not depend on ranks and phases."""
    from benchmarks.planning_models import MODELS
    from shardwright.planner.prepare import prepare

    return prepare(MODELS[name].config(), 2, batch=BATCH, seq=SEQ, device=DEVICE)


def measured(group: tuple[str, int, list[str]]) -> list[Row]:
    """Measure some phases of a model on a number of ranks, for each objective and by hand."""
    from shardwright.planner.search.ladder import SOLVING, climb
    from shardwright.planner.search.search_state import start
    from shardwright.planner.search.solution import SolverOptions, predicted

    name, tp, phases = group
    model = traced(name)
    rows: list[Row] = []
    for phase in phases:
        load = model.workload.model_copy(update={"phases": {phase: 1}})
        task = replace(model, workload=load, mesh={"tp": tp})
        row: Row = {"model": name, "tp": tp, "phase": phase}
        row["hand"] = by_hand(task, phase)
        for objective in OBJECTIVES:
            begun = time.process_time()
            now = climb(start(task, SolverOptions(objective=objective)), SOLVING)
            found = now.solution
            cost = predicted(task, found.layouts, found.unfolded)
            row[objective] = figures(cost, phase) | {
                "byte_price_ns": found.objective.byte_price_ns,
                "seconds": round(time.process_time() - begun, 2),
                "status": found.report.status,
                "fits": now.error_on_device is None,
            }
        rows.append(row)
    return rows


def by_hand(task: Any, phase: str) -> Row:
    """Price transformers' own plan, or say why there is none or it has no price."""
    from shardwright.errors import UsageError
    from shardwright.planner.hand_written.price import price
    from shardwright.planner.problem.tp_plan import OWN, table_of

    try:
        hand = price(task, table_of(OWN, task.source.module))
    except UsageError as error:
        return {"problem": str(error)}
    return figures(hand.predicted, phase) if hand.predicted else {"problem": hand.problem}


def figures(predicted: Prediction, phase: str) -> Row:
    """Return the compared figures; collectives of a backward pass only if there is one."""
    assert predicted.memory is not None
    return {
        "bytes": max(predicted.parameter_bytes),
        "held": predicted.memory.total,
        "collectives": sum(
            c.count for c in predicted.collectives if c.phase != "backward" or phase == "train"
        ),
        "time_ns": predicted.time_ns,
    }


def worse(row: Row) -> list[str]:
    """List where the plan for least time exceeds the hand-written one without taking less time."""
    ours, hand = row["time"], row["hand"]
    if "problem" in hand or ours["time_ns"] < hand["time_ns"]:
        return []
    return [of for of in ("bytes", "collectives") if ours[of] > hand[of]]


def text(rows: Sequence[Row]) -> str:
    """Format the rows for people, with what is worse and a summary."""
    head = f"{'MODEL':<16}{'TP':>3} {'PHASE':<8}"
    for of in ("GB OF WEIGHTS", "COLLECTIVES", "MILLISECONDS"):
        head += f"{of:>27}"
    sides = f"{'':28}" + f"{'time':>9}{'memory':>9}{'tp_plan':>9}" * 3
    lines = [
        f"{version('transformers')} of transformers, {DEVICE}, batch {BATCH} of {SEQ} tokens; "
        "time and memory: our plans for that; tp_plan: transformers' own",
        "",
        head,
        sides.rstrip(),
    ]
    for row in rows:
        line = f"{row['model']:<16}{row['tp']:>3} {row['phase']:<8}"
        for of, unit, digits in (("bytes", 1e9, 2), ("collectives", 1, 0), ("time_ns", 1e6, 2)):
            for side in (*OBJECTIVES, "hand"):
                n = row[side].get(of)
                line += f"{'-' if n is None else f'{n / unit:.{digits}f}':>9}"
        lines.append(line + ("" if row["time"]["fits"] else " *"))
    both = [r for r in rows if "problem" not in r["hand"]]
    found = [f"  {r['model']} tp={r['tp']} {r['phase']}: {', '.join(w)}"
             for r in rows if (w := worse(r))]  # fmt: skip
    less = sum(r["time"]["time_ns"] < r["hand"]["time_ns"] for r in both)
    equal = sum(r["time"]["time_ns"] == r["hand"]["time_ns"] for r in both)
    lines += [
        "",
        "* no plan fits the device: planned for least memory",
        f"{len(both)} of {len(rows)} have a hand-written plan with a price: time {less} below, "
        f"{equal} equal, {len(both) - less - equal} above",
        f"bytes or collectives above the hand-written plan's without less time: {len(found)}",
    ]
    return "\n".join([*lines, *found]) + "\n"


def key(row: Row) -> tuple[str, int, int]:
    """Return the key of a row, in the order of the table."""
    return row["model"], row["tp"], PHASES.index(row["phase"])


def made(todo: Sequence[tuple[str, int, str]], jobs: int) -> Iterator[Row]:
    """Yield the rows, those of one model and number of ranks together."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name, tp, phase in todo:
        groups.setdefault((name, tp), []).append(phase)
    with mp.get_context("spawn").Pool(jobs) as pool:
        work = [(*group, phases) for group, phases in groups.items()]
        for rows in pool.imap_unordered(measured, work):
            yield from rows


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", "ranks", type=int, multiple=True, default=RANKS)
@click.option("--phase", "phases", type=click.Choice(PHASES), multiple=True, default=PHASES)
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Models at the same time.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
@click.option("--text", "shown", type=click.Path(path_type=Path), help="Write the table here.")
def main(
    names: tuple[str, ...], ranks: tuple[int, ...], phases: tuple[str, ...], jobs: int,
    path: Path | None, shown: Path | None,
) -> None:  # fmt: skip
    """Plan published models for least time and for least memory."""
    from benchmarks.planning_models import MODELS

    rows = json.loads(path.read_text())["rows"] if path and path.exists() else []
    wanted = [(m, tp, phase) for m in names or MODELS for tp in ranks for phase in phases]
    done = {(r["model"], r["tp"], r["phase"]) for r in rows}
    for row in made([case for case in wanted if case not in done], jobs):
        rows = sorted([*rows, row], key=key)
        if path:
            about = {"batch": BATCH, "seq": SEQ, "device": DEVICE}
            about |= {package: version(package) for package in ("torch", "transformers")}
            write_atomically(path, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    report = text(rows)
    print(report, end="")
    if shown:
        write_atomically(shown, report)
    sys.exit(any(worse(row) for row in rows))


if __name__ == "__main__":
    main()
