"""Compares predicted with measured time: several plans of one model, each on real gloo ranks.

    torchrun --nproc-per-node 2 -m shardwright calibrate -o profile.json
    python -m benchmarks.prediction --device profile.json --json FILE

The plans differ in the modules that every rank computes in full, and in pins. Each is predicted for
the device and applied, and its forward pass is timed. Every turn runs all plans, so that other work
of the machine slows all equally, and each turn has another order, so that no plan always follows
the one that fills the caches. The slowest rank's time counts for a turn, and the median over the
turns, as in `calibrate`, whose figures the prediction uses. On a busy machine the least time would
be that of a turn in which nobody waited, which predicts no other turn. Prints both times and their
rank correlation (Spearman); exits with 1 if that is below 0.8.
"""

from __future__ import annotations

import copy
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

import shardwright
from shardwright.planner.contract.files import write_atomically
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.devices.device import device as profile_of
from shardwright.planner.prepare import prepare
from shardwright.planner.search.ladder import climb
from shardwright.planner.search.restrictions import Restrictions, unpinned_problem
from shardwright.planner.search.search_state import start
from shardwright.planner.search.solution import SolverOptions
from shardwright.runtime.communication.mesh import Mesh

BATCH, SEQ, VOCABULARY, LAYERS = 4, 128, 8192, 4
LEAST = 0.8
"""Least rank correlation that passes."""

BLOCK = "model.layers.*"
MLPS, ATTENTION, HEAD = f"{BLOCK}.mlp*", f"{BLOCK}.self_attn*", "lm_head"


@dataclass(frozen=True)
class Variant:
    """What distinguishes a plan: modules that every rank computes in full, and pins."""

    whole: tuple[str, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)


def columns(module: str, *names: str) -> dict[str, str]:
    """Return pins that split linear layers by their input dim instead of their output dim."""
    return {f"{BLOCK}.{module}.{name}_proj.weight": "shard:1" for name in names}


VARIANTS = {
    "as planned": Variant(),
    "head whole": Variant((HEAD,)),
    "attention whole": Variant((ATTENTION,)),
    "MLPs whole": Variant((MLPS,)),
    "attention and head whole": Variant((ATTENTION, HEAD)),
    "MLPs and head whole": Variant((MLPS, HEAD)),
    "blocks whole": Variant((MLPS, ATTENTION)),
    "all whole": Variant(("*",)),
    "down by rows": Variant(pins={f"{BLOCK}.mlp.down_proj.weight": "shard:0"}),
    "gate and up by columns": Variant(pins=columns("mlp", "gate", "up")),
    "q, k and v by columns": Variant(pins=columns("self_attn", "q", "k", "v")),
    "gate and up by columns, attention whole": Variant((ATTENTION,), columns("mlp", "gate", "up")),
}


def planned(model: torch.nn.Module, variant: Variant, tp: int, device: str) -> Plan:
    """Return the cheapest plan that `variant` allows."""
    task = prepare(model, tp, batch=BATCH, seq=SEQ, device=device, pins=variant.pins)
    states = unpinned_problem(task, Restrictions()).costs.states
    stored = {use.used: use.stored for use in task.graph.uses}
    names = {
        name
        for op in task.graph.ops
        if any(fnmatchcase(op.module, pattern) for pattern in variant.whole)
        for name in (*op.inputs, *op.outputs)
    }
    names |= {stored[name] for name in names & stored.keys()}
    forbidden = frozenset((n, s) for n in names for s in states.splits(n))
    return climb(
        start(task, SolverOptions(objective="memory"), Restrictions(task.pins, forbidden))
    ).plan


def build() -> torch.nn.Module:
    """Build a dense float32 decoder whose products take longer than the machine's noise."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, dtype="float32",
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def work(rank: int, ranks: int, plans: list[str], repeat: int, port: int, results: Any) -> None:
    """Run one rank: every plan, `repeat` times; rank 0 reports each plan's seconds."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = Mesh.from_device_mesh(init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
    model = build()
    models = [shardwright.apply(copy.deepcopy(model), Plan.from_json(p), mesh) for p in plans]
    del model
    ids = torch.randint(VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    for turn in range(repeat + 1):  # the first turn warms up
        for at in random.Random(turn).sample(range(len(models)), len(models)):
            dist.barrier()
            begun = time.perf_counter()
            with torch.no_grad():
                models[at](ids, use_cache=False)
            seconds = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if rank == 0 and turn:
                results.put((at, float(seconds)))
    dist.destroy_process_group()


def measure(plans: list[Plan], repeat: int) -> list[list[float]]:
    """Return the seconds of each plan's forward passes on as many processes as it has ranks."""
    results = mp.get_context("spawn").SimpleQueue()
    ranks, texts = plans[0].world_size, [p.to_json() for p in plans]
    port = 29500 + os.getpid() % 2000
    context = mp.spawn(work, (ranks, texts, repeat, port, results), nprocs=ranks, join=False)
    assert context is not None
    out: list[list[float]] = [[] for _ in plans]
    total = len(plans) * repeat
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("measuring", total=total)
        for _ in range(total):
            while results.empty():
                context.join(timeout=0.05)  # raises a rank's error
            at, seconds = results.get()
            out[at].append(seconds)
            progress.advance(task)
    context.join()
    return out


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation of two lists; equal values share a rank."""

    def ranked(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]

    return statistics.correlation(ranked(a), ranked(b))


def table(rows: list[dict[str, Any]]) -> Table:
    """Format the rows for people, fastest prediction first."""
    out = Table(title="milliseconds of a forward pass", title_justify="left")
    for title in ("PLAN", "PREDICTED", "MEASURED", "FROM", "TO", "COLLECTIVES"):
        out.add_column(title, justify="left" if title == "PLAN" else "right")
    for row in sorted(rows, key=lambda r: r["predicted_ms"]):
        figures = (row[k] for k in ("predicted_ms", "measured_ms", "fastest_ms", "slowest_ms"))
        out.add_row(row["plan"], *(f"{ms:.1f}" for ms in figures), str(row["collectives"]))
    return out


@click.command()
@click.option("--tp", type=click.IntRange(min=2), default=2, help="Ranks.")
@click.option("--device", default="cpu-gloo", help="Profile; one that `calibrate` wrote is best.")
@click.option("--repeat", type=click.IntRange(min=1), default=21, help="Runs of each plan.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(tp: int, device: str, repeat: int, path: Path | None) -> None:
    """Compare predicted with measured time."""
    model = build()
    plans = [planned(model, variant, tp, device) for variant in VARIANTS.values()]
    rows = []
    for name, plan, seconds in zip(VARIANTS, plans, measure(plans, repeat), strict=True):
        forward = [c for c in plan.predicted.collectives if c.phase == "forward"]
        rows.append({
            "plan": name,
            "predicted_ms": plan.predicted.time_ns / 1e6,
            "measured_ms": statistics.median(seconds) * 1e3,
            "fastest_ms": min(seconds) * 1e3,
            "slowest_ms": max(seconds) * 1e3,
            "collectives": sum(c.count for c in forward),
            "collective_bytes": sum(c.bytes for c in forward),
        })  # fmt: skip
    found = spearman([r["predicted_ms"] for r in rows], [r["measured_ms"] for r in rows])
    Console(width=110).print(table(rows))
    print(f"rank correlation over {len(rows)} plans: {found:.2f} (at least {LEAST})")
    if path:
        profile = profile_of(device).model_dump()
        about = {"tp": tp, "device": profile, "repeat": repeat, "cores": os.cpu_count()}
        result = {"about": about, "rows": rows, "rank_correlation": found}
        write_atomically(path, json.dumps(result, indent=1, sort_keys=True) + "\n")
    sys.exit(0 if found >= LEAST else 1)


if __name__ == "__main__":
    main()
