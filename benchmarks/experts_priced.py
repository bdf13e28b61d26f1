"""Prices published mixtures with their experts over `ep`, beside meshes of `tp` and `dp`.

    python -m benchmarks.experts_priced              two models, two clusters, prefill and decode
    python -m benchmarks.experts_priced qwen3-235b --json FILE
    python -m benchmarks.experts_priced --published  a prefill that SGLang has measured

Needs no weights and no GPU. Weights are in bfloat16, on hosts of eight H200. Meshes that do not fit
are priced, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

import shardwright
from benchmarks.planning_models import MODELS
from benchmarks.zoo import write
from shardwright.planner.contract.mesh import mesh_text
from shardwright.planner.devices.device import device

DEVICE, PER_HOST = "h200-nvlink", 8
NAMES = ("deepseek-v3", "qwen3-235b-a22b")
CLUSTERS = (2, 8)
"""Hosts."""
LOADS: dict[str, dict[str, Any]] = {
    "prefill": {"phase": "prefill", "batch": 128, "seq": 2048},
    "decode": {"phase": "decode", "batch": 128, "seq": 2048},
    "decode, 1024 sequences": {"phase": "decode", "batch": 1024, "seq": 2048},
}


PUBLISHED: tuple[tuple[int, dict[str, int], int], ...] = (
    (4, {"ep": 32, "tp": 1}, 128),
    (2, {"tp": 16}, 64),
)
"""Hosts of 8 H100, mesh, and sequences of 4,096 tokens.

SGLang reports 52,300 tokens/s a host for the first, in FP8, and five times plain tensor parallelism
(lmsys.org, May 2025).
"""


def published() -> None:
    """Print the tokens a second of a host in a prefill, on the meshes of SGLang's report."""
    config, found = MODELS["deepseek-v3"].config(), []
    for hosts, mesh, batch in PUBLISHED:
        how: Any = {"device": "h100-nvlink", "gpus_per_host": PER_HOST, "memory": 1 << 50}
        plan = shardwright.plan(config, mesh=mesh, batch=batch, seq=4096, **how)
        found.append(batch * 4096 / plan.predicted.time_ns * 1e9 / hosts)
        click.echo(f"{mesh} on {hosts} hosts: {found[-1]:,.0f} tokens/s a host")
    click.echo(f"{found[0] / found[1]:.1f} times as many")


def meshes(ranks: int) -> list[dict[str, int]]:
    """Return tp within hosts or not at all, with dp or ep, and tp over all ranks."""
    some = [{dim: ranks // tp, "tp": tp} for tp in (1, PER_HOST) for dim in ("dp", "ep")]
    return [*some, {"tp": ranks}]


def priced(name: str, hosts: int, load: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Return the row of one mesh."""
    how = {"device": DEVICE, "gpus_per_host": PER_HOST, "memory": 1 << 50, **LOADS[load]}
    plan = shardwright.plan(MODELS[name].config(), mesh=mesh, **how)
    assert plan.predicted.memory is not None, "only old plans have none"
    memory = plan.predicted.memory.total
    fits = memory <= device(DEVICE).memory_bytes
    return {
        "model": name, "hosts": hosts, "load": load, "mesh": mesh, "fits": fits,
        "ms": round(plan.predicted.time_ns / 1e6, 2), "gib": round(memory / 2**30, 1),
    }  # fmt: skip


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
@click.option("--published", "reported", is_flag=True, help="Price what SGLang has measured.")
def main(names: tuple[str, ...], path: Path | None, reported: bool) -> None:
    """Price mixtures on several meshes."""
    if reported:
        published()
        return
    console = Console(stderr=True)
    jobs = [
        (name, hosts, load, mesh)
        for name in names or NAMES
        for hosts in CLUSTERS
        for load in LOADS
        for mesh in meshes(hosts * PER_HOST)
    ]
    rows = []
    for job in track(jobs, "pricing", console=console, disable=not console.is_terminal):
        rows.append(priced(*job))
        if path:
            write(path, {"device": DEVICE, "rows": rows})
    table = Table("model", "hosts", "load", "mesh", "ms", "GiB", "", box=None)
    for row in rows:
        mesh = mesh_text(row["mesh"])
        fits = "" if row["fits"] else "does not fit"
        cells = (row["model"], row["hosts"], row["load"], mesh, row["ms"], row["gib"], fits)
        table.add_row(*map(str, cells))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
