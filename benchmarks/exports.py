"""Counts the architectures that transformers' own runtime splits correctly by our exports.

    python -m benchmarks.exports --json F                   all architectures without a row in F
    python -m benchmarks.exports --json F --refused         and again those that were refused
    python -m benchmarks.exports llama gpt2                 some
    python -m benchmarks.exports --plans DIR                with plans from `benchmarks.plans DIR`

Each tiny model is planned, saved, and loaded by transformers on real gloo ranks: by the tables of
its own styles that `planner/exports/stock` makes from the plan, until one passes, and by our style
for the full plan. Logits and all gradients are compared with the unsharded model, in float64. What
passes is compared again on other inputs, and counts as wrong if it then differs. A table that holds
more than 1.05 times the plan's bytes on a rank is refused. transformers needs accelerate.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers.distributed import mixin
from transformers.distributed.utils import initialize_distributed_mesh

from benchmarks.compare import of_all
from benchmarks.zoo import FIRST, SAMPLE, in_order, write
from benchmarks.zoo_case import build
from benchmarks.zoo_ranks import sweep
from shardwright.errors import ShardwrightError, UsageError
from shardwright.planner.contract.files import write_atomically
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.table import MAX_RATIO, candidates, held
from shardwright.planner.on_ranks.stock import Table, Way, compared, reference
from shardwright.runtime.communication.mesh import Mesh
from tests import planning, zoo

Row = dict[str, Any]


def exported(plans: Path | None, kind: str, name: str, rank: int, tp: int, mesh: Mesh) -> Row:
    """Return the row of one architecture; every rank returns the same row."""
    del mesh  # transformers makes its own mesh
    begun = time.perf_counter()
    mixin.initialize_distributed_mesh = one_mesh
    row: Row = {"kind": kind, "name": name}
    config, model = build(kind, name, torch.float32)
    box: list[Any] = [None]
    if rank == 0:
        try:
            plan = _planned(plans, kind, name, config, model, tp)
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
    unsplit = sum(held({}, model, 1).values())
    more = [sum(held(t, model, tp).values()) / unsplit * whole / ours for t in tables]
    small = [t for t, much in zip(tables, more, strict=True) if much <= MAX_RATIO]
    least = min(more, default=whole / ours)
    row["stock"] = {"refused": f"holds {least:.2f} of the plan's bytes"}
    for i, table in enumerate(small):
        tried = _tried(Table(table), cls, directory, wanted, tp) | {"tries": i + 1}
        if "refused" not in tried:
            row["stock"] = tried | {"gathered": sum("_" in s for s in table.values())}
            break
        if not i:  # for refused models, the result of the first table
            row["stock"] = tried
    row["own"] = _tried(Table(plan), cls, directory, wanted, tp)
    for way in ("stock", "own"):
        if row[way].get("share", 0) > MAX_RATIO * ours / whole:
            row[way] = {"wrong": f"holds {row[way]['share']:.2f} of all bytes"}
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def _planned(plans: Path | None, kind: str, name: str, config: Any, model: Any, tp: int) -> Plan:
    """Load a model's plan from the folder, or make it and store it there.

    Raises:
        UsageError: the stored plan is for another number of ranks.
    """
    kept = plans and plans / f"{kind}-{name}.json"
    if kept and kept.exists():
        found = Plan.load(kept)
        if found.world_size != tp:
            raise UsageError(f"{kept} is for {found.world_size} ranks: keep others elsewhere")
        return found
    plan = planning.proven(model, tp=tp, kwargs=zoo.example(name, config, kind))
    if kept:
        write_atomically(kept, plan.to_json())
    return plan


def one_mesh(config: Any) -> Any:
    """Return transformers' mesh, made once per process: each has groups, and these have threads."""
    if config.tp_size not in _MESHES:
        _MESHES[config.tp_size] = initialize_distributed_mesh(config)
    return _MESHES[config.tp_size]


_MESHES: dict[int, Any] = {}


def _tried(way: Way, cls: Any, directory: str, wanted: list[Any], tp: int) -> Row:
    """Return the result of one way to split: equal on the first inputs, and then on the others."""
    found = []
    _clear_sharding_prop_cache()  # torch's cache entries of other models are wrong for some
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
    """Return the counts, and why models were refused."""
    lines = []
    for what in ("stock", "own"):
        found = {r["kind"] + " " + r["name"]: r.get(what, r) for r in rows}
        right = {n for n, f in found.items() if "logits" in f}
        wrong = {n for n, f in found.items() if "wrong" in f}
        none = {f"{r['kind']} {r['name']}" for r in rows if not r.get("stock_rules")} & right
        causal = {n for n in found if n.startswith("causal ")}
        lines.append(
            f"{what}: {len(right & causal)} of {len(causal)} causal and {len(right - causal)} of "
            f"{len(found) - len(causal)} other architectures equal (of these {len(none)} without a "
            f"table in transformers), {len(found) - len(right | wrong)} refused, {len(wrong)} wrong"
        )
        for name in found.keys() - right:
            why = found[name].get("refused") or found[name].get("error")
            lines.append(f"  {name}: {'WRONG: ' + found[name]['wrong'] if name in wrong else why}")
    return "\n".join(lines)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", default=2, help="Ranks.")
@click.option("--kind", default=None, type=click.Choice(list(FIRST)), help="Only these.")
@click.option("--limit", default=180.0, help="Seconds for a model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Results; what it has stays.")
@click.option("--refused", is_flag=True, help="Run again what the results have as refused.")
@click.option(
    "--plans", type=click.Path(path_type=Path), help="A directory of plans, which takes in others."
)
def main(
    names: tuple[str, ...],
    tp: int,
    kind: str | None,
    limit: float,
    path: Path | None,
    refused: bool,
    plans: Path | None,
) -> None:
    """Export plans of tiny models to transformers, and run them there."""
    order = [(k, n) for k in FIRST for n in zoo.names(k)]
    rows = {(r["kind"], r["name"]): r for r in _rows(path)}
    wanted = [j for j in order if kind in (None, j[0]) and (not names or j[1] in names)]
    jobs = [j for j in wanted if j not in rows or (refused and not _passed(rows[j]))]
    jobs.sort(key=lambda job: job[1] not in FIRST[job[0]] + SAMPLE[job[0]])
    if plans:
        plans.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    done = sweep(jobs, tp, partial(exported, plans), 1, limit)
    for row in track(
        done, "exporting", len(jobs), console=console, disable=not console.is_terminal
    ):
        rows[row["kind"], row["name"]] = row
        if path:
            write(path, {"tp": tp, "rows": in_order(list(rows.values()), order)})
    print(summary([rows[j] for j in wanted if j in rows]))


def _rows(path: Path | None) -> list[Row]:
    return json.loads(path.read_text())["rows"] if path and path.exists() else []


def _passed(row: Row) -> bool:
    return all("logits" in row.get(what, {}) for what in ("stock", "own"))


if __name__ == "__main__":
    main()
