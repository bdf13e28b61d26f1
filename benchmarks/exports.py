"""Count how many architectures transformers' own runtime splits right by what we export.

    python -m benchmarks.exports                             every architecture
    python -m benchmarks.exports --kind causal llama gpt2    some

Each tiny model is planned, saved, and read by transformers on real gloo ranks: by the tables of its
own styles that `planner/exports/stock` makes of the plan, one after the other until one passes, and
by our style for the whole plan. Logits and all gradients are compared with the unsplit model, in
float64. What passes is compared again on other inputs: what then differs is wrong. A table that
holds more than 1.05 of the plan's bytes on a rank is refused. transformers wants accelerate.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from transformers.distributed import mixin
from transformers.distributed.utils import initialize_distributed_mesh

from benchmarks.compare import of_all
from benchmarks.zoo import FIRST, SAMPLE, in_order, write
from benchmarks.zoo_case import build
from benchmarks.zoo_ranks import sweep
from shardwright.errors import ShardwrightError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.table import MOST, candidates, held
from shardwright.planner.on_ranks.stock import Table, Way, WholePlan, compared, reference
from shardwright.runtime.mesh import Mesh
from tests import planning, zoo

Row = dict[str, Any]


def exported(kind: str, name: str, rank: int, tp: int, mesh: Mesh) -> Row:
    """What came of one architecture; every rank returns the same row."""
    del mesh  # transformers makes its own
    mixin.initialize_distributed_mesh = _one_mesh
    row: Row = {"kind": kind, "name": name}
    config, model = build(kind, name, torch.float32)
    box: list[Any] = [None]
    if rank == 0:
        try:
            plan = planning.plan(model, tp=tp, kwargs=zoo.example(name, config, kind))
            box = [(plan.to_json(), tempfile.mkdtemp(), list(candidates(plan, model)))]
            model.save_pretrained(box[0][1])
        except ShardwrightError as error:
            box = [error]
    dist.broadcast_object_list(box)
    if isinstance(box[0], ShardwrightError):
        return row | {"refused": f"no plan: {box[0]}"}
    text, directory, tables = box[0]
    plan = Plan.from_json(text)
    ours, whole = max(plan.predicted.parameter_bytes), plan.predicted.unsharded_bytes
    row |= {"bytes": ours, "whole_bytes": whole, "stock_rules": len(model.tp_plan or {})}
    inputs = [zoo.inputs(name, config, kind=kind, seed=s, seq=n) for s, n in ((0, 16), (5, 11))]
    cls = type(model)
    wanted = [(given, reference(cls, directory, given)) for given in inputs]
    small = [t for t in tables if sum(held(t, model, tp).values()) <= MOST * ours]
    more = min((sum(held(t, model, tp).values()) for t in tables), default=whole) / ours
    row["stock"] = {"refused": f"holds {more:.2f} of the plan's bytes"}
    for i, table in enumerate(small):
        row["stock"] = _tried(Table(table), cls, directory, wanted, tp) | {"tries": i + 1}
        if "refused" not in row["stock"]:
            row["stock"]["gathered"] = sum("_" in s for s in table.values())
            break
    row["own"] = _tried(WholePlan(plan), cls, directory, wanted, tp)
    for way in ("stock", "own"):
        if row[way].get("share", 0) > MOST * ours / whole:
            row[way] = {"wrong": f"holds {row[way]['share']:.2f} of all bytes"}
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)
    return row


def _one_mesh(config: Any) -> Any:
    """Transformers' mesh, made once a process: each has groups, and each of these has threads."""
    if config.tp_size not in _MESHES:
        _MESHES[config.tp_size] = initialize_distributed_mesh(config)
    return _MESHES[config.tp_size]


_MESHES: dict[int, Any] = {}


def _again(rows: list[Row], tp: int, limit: float) -> Iterator[Row]:
    """What raised, in processes in which nothing else has failed before."""
    for row in [r for r in rows if "Error" in str(r.get("stock", r))]:
        yield from sweep([(row["kind"], row["name"])], tp, exported, 1, limit)


def _tried(way: Way, cls: Any, directory: str, wanted: list[Any], tp: int) -> Row:
    """What came of one way to split: equal on the first inputs, and then on the others."""
    found = []
    for given, want in wanted:
        try:
            ran, raised = compared(way, cls, directory, given, want), ""
        except Exception as error:
            text = (str(error).strip() or "no message").splitlines()[0]
            ran, raised = None, f"{type(error).__name__}: {text:.150}"
            if os.environ.get("TRACEBACKS"):
                traceback.print_exc()
        errors: list[str] = of_all(raised, tp)
        if any(errors):
            return {"refused" if not found else "wrong": max(errors)}
        assert ran is not None
        far = f"logits {ran.logits:.1e}, gradients {ran.gradients:.1e} ({ran.worst})"
        if not ran.ok:
            return {"refused" if not found else "wrong": far}
        found.append(ran)
    return {
        "logits": found[0].logits,
        "gradients": found[0].gradients,
        "share": found[0].share,
    }


def summary(rows: list[Row]) -> str:
    """The counts, and why what was refused was."""
    lines = []
    for what in ("stock", "own"):
        found = [r[what] for r in rows if what in r]
        right = [f for f in found if "logits" in f]
        wrong = [r["name"] for r in rows if "wrong" in r.get(what, {})]
        none = [r for r in rows if not r.get("stock_rules") and "logits" in r.get(what, {})]
        lines.append(
            f"{what}: {len(right)} of {len(rows)} equal (of these {len(none)} without a table in "
            f"transformers), {len(rows) - len(right) - len(wrong)} refused, {len(wrong)} wrong"
        )
        for row in rows:
            reason = row.get(what, row).get("refused") or row.get(what, row).get("error")
            if reason or "wrong" in row.get(what, {}):
                lines.append(f"  {row['kind']} {row['name']}: {reason or 'WRONG'}")
    return "\n".join(lines)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", default=2, help="Ranks.")
@click.option("--kind", default=None, type=click.Choice(list(FIRST)), help="Only these.")
@click.option("--limit", default=180.0, help="Seconds for a model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(
    names: tuple[str, ...], tp: int, kind: str | None, limit: float, path: Path | None
) -> None:
    """Export plans of tiny models to transformers, and run them there."""
    kinds = [kind] if kind else list(FIRST)
    jobs = [(k, n) for k in kinds for n in zoo.names(k) if not names or n in names]
    jobs.sort(key=lambda job: job[1] not in FIRST[job[0]] + SAMPLE[job[0]])
    rows: list[Row] = []
    console = Console(stderr=True)
    done = chain(sweep(jobs, tp, exported, 1, limit), _again(rows, tp, limit))
    for row in track(
        done, "exporting", len(jobs), console=console, disable=not console.is_terminal
    ):
        rows[:] = [r for r in rows if (r["kind"], r["name"]) != (row["kind"], row["name"])] + [row]
        if path:
            write(path, {"tp": tp, "rows": in_order(rows, jobs)})
    print(summary(in_order(rows, jobs)))


if __name__ == "__main__":
    main()
