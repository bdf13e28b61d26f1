"""Times a mixture's prefill with its experts over `ep` and with their features over `tp`.

    python -m benchmarks.experts_speed                   on 2 and 4 gloo ranks of this machine
    python -m benchmarks.experts_speed --ranks 2 --json FILE

The ranks first measure this machine. Both meshes have the same ranks and the same batch, and are
planned for least time with that profile, so that the plans say which is faster. Then both run in
turn, in one process a rank with one thread, and their logits are compared. The slowest rank's time
counts for a turn, and the median over the turns.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, MixtralConfig

import shardwright
from benchmarks.zoo import write
from shardwright.planner.contract.mesh import replicas
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.devices.calibrate import effort, measure
from shardwright.planner.on_ranks.launch import run_processes
from shardwright.runtime.communication.mesh import Mesh
from tests.ranks import copy_number

VOCABULARY, WIDTH, INNER, LAYERS = 256, 512, 1024, 4
SHAPES = ((8, 128), (8, 512))
"""Sequences and their tokens."""


def config(chosen: int) -> Any:
    """Return a mixture of eight experts with 55 M parameters."""
    return MixtralConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=VOCABULARY,
        num_local_experts=8, num_experts_per_tok=chosen, dtype="float32",
        architectures=["MixtralForCausalLM"],
    )  # fmt: skip


def calibrated() -> Any:
    """Measure this machine, on each rank."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    return measure(cpu, effort(cpu, quick=False), lambda: None)


def timed(texts: list[str], chosen: int, batch: int, seq: int, repeat: int) -> dict[str, Any]:
    """Return the seconds of each plan's turns, and how far their logits are apart."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole: Any = AutoModelForCausalLM.from_config(config(chosen)).eval()
    ids = torch.randint(VOCABULARY, (batch, seq), generator=torch.Generator().manual_seed(0))
    runs: list[tuple[Any, torch.Tensor, int]] = []
    for plan in map(Plan.from_json, texts):
        dims = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
        mesh = Mesh.from_device_mesh(dims)
        part = copy_number(mesh)
        own = ids.chunk(replicas(plan.mesh))[part]
        runs.append((shardwright.apply(copy.deepcopy(whole), plan, mesh), own, part * len(own)))
    del whole
    seconds: list[list[float]] = [[] for _ in runs]
    made: list[Any] = [None for _ in runs]
    for turn in range(repeat + 1):  # the first turn warms up
        for at in range(len(runs))[:: 1 if turn % 2 else -1]:
            model, own, _ = runs[at]
            dist.barrier()
            begun = time.perf_counter()
            with torch.no_grad():
                made[at] = model(own, use_cache=False).logits
            took = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[at] += [float(took)] * (turn > 0)
    (one, other), (first, second) = made, [start for _, _, start in runs]
    both = slice(max(first, second), min(first + len(one), second + len(other)))
    apart = [x[both.start - s : both.stop - s] for x, s in ((one, first), (other, second))]
    found = torch.zeros(1) + (float((apart[0] - apart[1]).abs().max()) if apart[0].numel() else 0)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {"seconds": seconds, "apart": float(found)}


@click.command()
@click.option("--ranks", "sizes", type=int, multiple=True, default=(2, 4), help="Ranks.")
@click.option("--chosen", type=int, multiple=True, default=(1, 2), help="Experts of a token.")
@click.option("--repeat", type=click.IntRange(min=1), default=15, help="Turns.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(sizes: tuple[int, ...], chosen: tuple[int, ...], repeat: int, path: Path | None) -> None:
    """Compare experts over ep with tp, as predicted and as measured."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sizes:
            profile = Path(folder) / f"{ranks}.json"
            profile.write_text(run_processes(ranks, calibrated)[0].model_dump_json())
            dp = {"dp": ranks // 2} if ranks > 2 else {}
            meshes = [{**dp, "ep": 2, "tp": 1}, {**dp, "tp": 2}]
            for k in chosen:
                for batch, seq in SHAPES:
                    how: Any = {"phase": "prefill", "batch": batch, "seq": seq}
                    how |= {"device": str(profile), "memory": 1 << 40}
                    plans = [shardwright.plan(config(k), mesh=mesh, **how) for mesh in meshes]
                    texts = [plan.to_json() for plan in plans]
                    found = run_processes(ranks, timed, texts, k, batch, seq, repeat)[0]
                    rows.append({
                        "ranks": ranks, "chosen": k, "batch": batch, "seq": seq,
                        "meshes": meshes, "apart": found["apart"],
                        "predicted_ms": [plan.predicted.time_ns / 1e6 for plan in plans],
                        "measured_ms": [1e3 * statistics.median(s) for s in found["seconds"]],
                    })  # fmt: skip
                    if path:
                        write(path, {"rows": rows})
    Console(width=110).print(table(rows))


def table(rows: list[dict[str, Any]]) -> Table:
    """Format the rows for people."""
    out = Table(title="milliseconds of a prefill: ep, tp, tp / ep", title_justify="left")
    for title in ("RANKS", "EXPERTS OF A TOKEN", "TOKENS", "PREDICTED", "MEASURED", "APART"):
        out.add_column(title, justify="right")
    for row in rows:
        pairs = (row["predicted_ms"], row["measured_ms"])
        figures = (f"{ep:.0f} {tp:.0f} {tp / ep:.2f}" for ep, tp in pairs)
        tokens = f"{row['batch']} x {row['seq']}"
        told = str(row["ranks"]), str(row["chosen"]), tokens
        out.add_row(*told, *figures, f"{row['apart']:.0e}")
    return out


if __name__ == "__main__":
    main()
