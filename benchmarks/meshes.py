"""Measures choosing the mesh for published models: seconds, memory, and what is chosen.

    python -m benchmarks.meshes                    all models on 1, 2 and 8 hosts of 8 H100, 8 L4
    python -m benchmarks.meshes llama-8b --train   one, for training

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

CLUSTERS = ((1, "h100-nvlink"), (2, "h100-nvlink"), (8, "h100-nvlink"), (1, "l4-pcie"))
"""Hosts of eight devices each, and the device."""
SERVING = {"phase": "prefill,decode:128", "batch": 64, "seq": 1024}
TRAINING = {"phase": "train", "batch": 64, "seq": 2048}


def measure(name: str, how: dict[str, Any]) -> list[dict[str, Any]]:
    """Choose the mesh of one model for each cluster; runs in a process."""
    import torch

    import shardwright
    from benchmarks.planning_models import MODELS
    from benchmarks.quantized_models import QUANTIZED
    from benchmarks.quantized_models import config as quantized

    torch.set_num_threads(1)
    shardwright.plan(torch.nn.Linear(8, 8), 2, args=(torch.zeros(3, 8),))  # imports at first use
    rows = []
    for hosts, device in CLUSTERS:
        config = quantized(name) if name in QUANTIZED else MODELS[name].config()
        begun = time.perf_counter()
        plan = shardwright.plan(config, cluster=shardwright.Cluster(hosts, 8), device=device, **how)
        rows.append({
            "model": name, "hosts": hosts, "device": device, "mesh": plan.mesh,
            "dp": plan.workload.dp, "fits": plan.meshes[0].fits,
            "seconds": round(time.perf_counter() - begun, 2), "meshes": len(plan.meshes),
            "that fit": sum(choice.fits for choice in plan.meshes),
            "status": plan.solver.status, "peak_bytes": peak(),
        })  # fmt: skip
    return rows


def each(names: list[str], how: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all models, each measured in a process of its own."""
    for name in names:
        with mp.get_context("spawn").Pool(1) as pool:
            yield from pool.apply(measure, (name, how))


def table(rows: list[dict[str, Any]]) -> Table:
    """Format the rows for people."""
    out = Table("model", "hosts", "device", "mesh", "of meshes", "fit", "seconds", "MiB", box=None)
    for row in rows:
        mesh = ",".join(f"{name}={size}" for name, size in row["mesh"].items())
        out.add_row(
            row["model"], str(row["hosts"]), row["device"],
            mesh + (" (fsdp)" if row["dp"] == "fsdp" else ""), str(row["meshes"]),
            str(row["that fit"]), f"{row['seconds']:.1f}",
            f"{(row['peak_bytes'] or 0) / MEGABYTE:,.0f}",
        )  # fmt: skip
    return out


@click.command()
@click.argument("names", nargs=-1)
@click.option("--train", is_flag=True, help="For training, not for serving.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(names: tuple[str, ...], train: bool, path: Path | None) -> None:
    """Choose the mesh of published models."""
    from benchmarks.planning_models import MODELS
    from benchmarks.quantized_models import QUANTIZED

    chosen = [*(names or (*MODELS, *QUANTIZED))]
    console, rows = Console(stderr=True), []
    found = each(chosen, TRAINING if train else SERVING)
    total = len(chosen) * len(CLUSTERS)
    for row in track(found, "planning", total, console=console, disable=not console.is_terminal):
        rows.append(row)
    Console(width=110).print(table(rows))
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if all(row["status"] == "optimal" for row in rows) else 1)


if __name__ == "__main__":
    main()
