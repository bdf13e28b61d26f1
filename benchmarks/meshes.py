"""Measures choosing the mesh for published models: seconds, memory, and what is chosen.

    python -m benchmarks.meshes                    all models on 1, 2 and 8 hosts of 8 H100, 8 L4
    python -m benchmarks.meshes llama-8b --train   one, for training; on 128 hosts, too
    python -m benchmarks.meshes llama-8b --given   for training, on meshes that are given

Needs no network, no weights and no GPU. Each model is planned in its own process, after imports.
Exits with 1 if a mesh is neither proven optimal nor refused for its memory.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.planning import MEGABYTE, peak

H100 = "h100-nvlink"
CLUSTERS = ((1, H100), (2, H100), (8, H100), (1, "l4-pcie"))
"""Hosts of eight devices each, and the device."""
SERVING = {"phase": "prefill,decode:128", "batch": 64, "seq": 1024}
TRAINING = {"phase": "train", "batch": 64, "seq": 2048}
MANY = (128, H100)
"""Where training is planned too, with a sequence for each device."""
GIVEN: tuple[dict[str, int], ...] = (
    {"dp": 2, "tp": 4},
    {"dp": 8, "tp": 8},
    {"dp": 2, "cp": 2, "tp": 4},
)
"""Copies of the model share out parameters by `fully_shard`."""


def measure(name: str, kind: str) -> list[dict[str, Any]]:
    """Plan one model on each cluster or mesh; runs in a process."""
    import torch

    import shardwright
    from benchmarks.planning_models import MODELS
    from benchmarks.quantized_models import QUANTIZED
    from benchmarks.quantized_models import config as quantized

    torch.set_num_threads(1)
    shardwright.plan(torch.nn.Linear(8, 8), 2, args=(torch.zeros(3, 8),))  # imports at first use
    read = quantized if name in QUANTIZED else lambda name: MODELS[name].config()
    rows = []
    for where in cases(kind):
        begun = time.perf_counter()
        plan = shardwright.plan(read(name), **where)
        seconds = time.perf_counter() - begun
        choices = plan.meshes or [None]
        rows.append({
            "model": name, "ranks": plan.world_size, "device": where["device"], "mesh": plan.mesh,
            "dp": plan.workload.dp, "meshes": len(choices),
            "that fit": sum(choice is None or choice.fits for choice in choices),
            "seconds": round(seconds, 2), "status": plan.solver.status, "peak_bytes": peak(),
        })  # fmt: skip
    return rows


def cases(kind: str) -> list[dict[str, Any]]:
    """Return what `plan` is called with: for serving, for training, or on given meshes."""
    from shardwright import Cluster

    if kind == "given":
        here = {"device": H100, "dp": "fsdp", "gpus_per_host": 8}
        return [{"mesh": mesh, **here, **TRAINING} for mesh in GIVEN]
    work = TRAINING if kind == "train" else SERVING
    on = (*CLUSTERS[:3], MANY) if kind == "train" else CLUSTERS
    return [
        {
            "cluster": Cluster(hosts, 8), "device": device,
            **work, "batch": max(work["batch"], hosts * 8 * (kind == "train")),
        }
        for hosts, device in on
    ]  # fmt: skip


def each(names: list[str], kind: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of all models, each measured in a process of its own."""
    for name in names:
        with mp.get_context("spawn").Pool(1) as pool:
            yield from pool.apply(measure, (name, kind))


def table(rows: list[dict[str, Any]]) -> Table:
    """Format the rows for people."""
    out = Table("model", "GPUs", "device", "mesh", "of meshes", "fit", "seconds", "MiB", box=None)
    for row in rows:
        mesh = ",".join(f"{name}={size}" for name, size in row["mesh"].items())
        out.add_row(
            row["model"], str(row["ranks"]), row["device"],
            mesh + (" (fsdp)" if row["dp"] == "fsdp" else ""), str(row["meshes"]),
            str(row["that fit"]), f"{row['seconds']:.1f}",
            f"{(row['peak_bytes'] or 0) / MEGABYTE:,.0f}",
        )  # fmt: skip
    return out


@click.command()
@click.argument("names", nargs=-1)
@click.option("--train", "kind", flag_value="train", help="For training, not for serving.")
@click.option("--given", "kind", flag_value="given", help="For training, on given meshes.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(names: tuple[str, ...], kind: str | None, path: Path | None) -> None:
    """Choose the mesh of published models."""
    from benchmarks.planning_models import MODELS
    from benchmarks.quantized_models import QUANTIZED

    chosen = [*(names or (*MODELS, *QUANTIZED))]
    console, rows = Console(stderr=True), []
    kind = kind or "serve"
    found, total = each(chosen, kind), len(chosen) * len(cases(kind))
    for row in track(found, "planning", total, console=console, disable=not console.is_terminal):
        rows.append(row)
    Console(width=110).print(table(rows))
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if all(row["status"] == "optimal" for row in rows) else 1)


if __name__ == "__main__":
    main()
