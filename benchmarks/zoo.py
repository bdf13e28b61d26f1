"""Plan, split and compare tiny models of many architectures on real gloo ranks.

    python -m benchmarks.zoo                       the architectures of the first milestone, tp 2
    python -m benchmarks.zoo --tp 4 llama gpt2     some, on 4 ranks
    python -m benchmarks.zoo --kind masked --all   every masked one

Prints a table, and with `--json FILE` writes it. Exits with 1 if any differs from the whole model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

import shardwright
from benchmarks.compare import compare, reference
from shardwright.errors import ShardwrightError
from shardwright.planner.plan_file import Plan
from shardwright.runtime.mesh import Mesh
from tests import zoo

FIRST = {
    "causal": "llama mistral qwen2 qwen3 gemma2 phi phi3 gpt2 gpt_neox opt bloom falcon stablelm "
    "starcoder2 olmo2 cohere".split(),
    "masked": ["bert", "roberta"],
    "seq2seq": ["t5"],
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def build(kind: str, name: str, dtype: torch.dtype) -> tuple[Any, torch.nn.Module]:
    """A seeded tiny model, with torch's attention where it has it."""
    try:
        config, model = zoo.build(name, kind=kind, attn="sdpa")
    except ValueError:
        config, model = zoo.build(name, kind=kind, attn=None)
    return config, model.to(dtype)


def work(rank: int, tp: int, jobs: list[tuple[str, str]], port: int, results: Any) -> None:
    """One rank: every job in both dtypes; rank 0 plans and reports."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=tp)
    mesh = Mesh.from_device_mesh(init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)))
    for kind, name in jobs:
        row: dict[str, Any] = {"name": name, "kind": kind}
        begun = time.perf_counter()
        try:
            for dtype in (torch.float64, torch.float32):
                one(kind, name, dtype, rank, tp, mesh, row)
            row["seconds"] = round(time.perf_counter() - begun, 1)
        except ShardwrightError as error:
            row["error"] = f"{type(error).__name__}: {error}"
        if rank == 0:
            results.put(row)
    dist.destroy_process_group()


def one(
    kind: str, name: str, dtype: torch.dtype, rank: int, tp: int, mesh: Mesh, row: dict[str, Any]
) -> None:
    """Compare one model in one dtype."""
    config, model = build(kind, name, dtype)
    inputs = zoo.inputs(name, config, kind=kind)
    box: list[Any] = [None]
    if rank == 0:
        try:
            box = [shardwright.plan(model, tp=tp).to_json()]
        except ShardwrightError as error:
            box = [error]
    dist.broadcast_object_list(box)
    if isinstance(box[0], ShardwrightError):
        raise box[0]
    plan = Plan.from_json(box[0])
    found = compare(model, inputs, plan, mesh, reference(model, inputs))
    everyone: list[Any] = [None] * tp
    dist.all_gather_object(everyone, found.as_dict())
    label = str(dtype).removeprefix("torch.")
    row[label] = {
        key: max(
            ((r[key] != r[key], r[key]) for r in everyone if r[key] is not None), default=(0, None)
        )[1]
        for key in ("logits", "gradients", "decode")
    }
    row["split"], row["worst"] = found.split, found.worst
    row["forward"], row["backward"] = dict(found.forward), dict(found.backward)
    row["status"] = plan.solver.status
    row["whole"] = {w.parameter: w.reason for w in plan.whole}
    row["opaque"] = dict(plan.opaque)


def passed(row: dict[str, Any]) -> bool:
    """Whether all differences are within the tolerances."""
    if "error" in row:
        return False
    for dtype, limit in TOLERANCE.items():
        found = row[str(dtype).removeprefix("torch.")]
        # Written so that NaN fails.
        if not all(v is None or v <= limit for v in found.values()):
            return False
    return True


def table(rows: list[dict[str, Any]], tp: int) -> Table:
    """The results for people."""
    out = Table(title=f"whole and split models compared, tp={tp}", title_justify="left")
    out.add_column("MODEL")
    for title in (
        "LOGITS 64",
        "GRADS 64",
        "DECODE 64",
        "LOGITS 32",
        "GRADS 32",
        "SPLIT",
        "FORWARD",
        "BACKWARD",
    ):
        out.add_column(title, justify="right")
    out.add_column("")
    for row in rows:
        if "error" in row:
            out.add_row(row["name"], *[""] * 8, row["error"])
            continue
        a, b = row["float64"], row["float32"]
        figures = [a["logits"], a["gradients"], a["decode"], b["logits"], b["gradients"]]
        out.add_row(
            row["name"],
            *("-" if f is None else f"{f:.0e}" for f in figures),
            f"{row['split']:.0%}",
            str(sum(row["forward"].values())),
            str(sum(row["backward"].values())),
            "ok" if passed(row) else "DIFFERS",
        )
    return out


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", default=2, help="Ranks.")
@click.option("--kind", default=None, type=click.Choice(list(FIRST)), help="Only these.")
@click.option("--all", "everything", is_flag=True, help="Every architecture, not the first ones.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(
    names: tuple[str, ...], tp: int, kind: str | None, everything: bool, path: Path | None
) -> None:
    """Plan, split and compare tiny models on real gloo ranks."""
    jobs = [
        (k, n)
        for k in ([kind] if kind else FIRST)
        for n in (zoo.names(k) if everything else FIRST[k])
        if not names or n in names
    ]
    context = mp.get_context("spawn")
    results = context.Queue()
    port = 29500 + os.getpid() % 2000
    ranks = mp.spawn(work, (tp, jobs, port, results), nprocs=tp, join=False)
    error_console = Console(stderr=True)
    rows = []
    for _ in track(jobs, "comparing", console=error_console, disable=not sys.stderr.isatty()):
        while True:
            try:
                rows.append(results.get(timeout=5))
                break
            except Exception:  # queue.Empty: see whether the ranks live
                assert ranks is not None
                ranks.join(timeout=0)
    assert ranks is not None
    ranks.join()
    Console(width=130).print(table(rows, tp))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"tp": tp, "rows": rows}, indent=1, sort_keys=True) + "\n")
    failed = [r["name"] for r in rows if not passed(r)]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} equal"
        + (f"; not: {', '.join(failed)}" if failed else "")
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
