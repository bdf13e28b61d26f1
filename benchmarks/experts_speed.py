"""Times a mixture's prefill with its experts over `ep` and with their features over `tp`.

    python -m benchmarks.experts_speed                   on 2 and 4 gloo ranks of this machine
    python -m benchmarks.experts_speed --ranks 2 --json FILE

The ranks first measure this machine. Both meshes have the same ranks and the same batch, and are
planned for least time with that profile, so that the plans say which is faster. A model with random
weights does not choose its experts equally often; plans are told how many times the mean the rank
with most tokens gets. Then both run in turn, in one process a rank with one thread, and their
logits are compared. The slowest rank's time counts for a turn, and the median over the turns.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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

VOCABULARY, WIDTH, LAYERS, EXPERTS, BATCH = 256, 512, 4, 8, 8
TITLES = "RANKS FEATURES CHOSEN TOKENS BUSIEST PREDICTED MEASURED APART".split()


class Case(NamedTuple):
    """A mixture and its batch: features of an expert, experts of a token, sequences, tokens."""

    inner: int
    chosen: int
    batch: int
    seq: int


def config(case: Case) -> Any:
    """Return a mixture of eight experts, with 55 M parameters if they have 1,024 features."""
    return MixtralConfig(
        hidden_size=WIDTH, intermediate_size=case.inner, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=VOCABULARY,
        num_local_experts=EXPERTS, num_experts_per_tok=case.chosen, dtype="float32",
        architectures=["MixtralForCausalLM"],
    )  # fmt: skip


def made(case: Case) -> tuple[Any, torch.Tensor]:
    """Return the model, and token ids [batch, seq]."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config(case)).eval()
    shape = case.batch, case.seq
    return model, torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def imbalance(case: Case, ranks: int) -> float:
    """Return how many times the mean the rank with most tokens gets, the mean over all layers."""
    model, ids = made(case)
    found: list[float] = []

    def count(module: Any, args: tuple[Any, ...]) -> None:
        of_expert = torch.bincount(args[1].flatten(), minlength=EXPERTS).double()
        of_rank = of_expert.view(ranks, -1).sum(1)
        found.append(float(of_rank.max() / of_rank.mean()))

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(count)
    model(ids, use_cache=False)
    return statistics.mean(found)


def calibrated(turns: int) -> Any:
    """Measure this machine, on each rank."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    much = dataclasses.replace(effort(cpu, quick=False), turns=turns)
    return measure(cpu, much, lambda: None)


def timed(texts: list[str], case: Case, repeat: int) -> dict[str, Any]:
    """Return the seconds of each plan's turns, and how far their logits are apart."""
    torch.set_num_threads(1)
    whole, ids = made(case)
    runs: list[tuple[Any, torch.Tensor, int]] = []
    for plan in map(Plan.from_json, texts):
        dims = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
        mesh = Mesh.from_device_mesh(dims)
        part = copy_number(mesh)
        own = ids.chunk(replicas(plan.mesh))[part]
        runs.append((shardwright.apply(copy.deepcopy(whole), plan, mesh), own, part * len(own)))
    del whole
    seconds: list[list[float]] = [[] for _ in runs]
    logits: list[Any] = [None for _ in runs]
    for turn in range(repeat + 1):  # the first turn warms up
        for at in range(len(runs))[:: 1 if turn % 2 else -1]:
            model, own, _ = runs[at]
            dist.barrier()
            begun = time.perf_counter()
            with torch.no_grad():
                logits[at] = model(own, use_cache=False).logits
            took = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[at] += [float(took)] * (turn > 0)
    (one, other), (first, second) = logits, [start for _, _, start in runs]
    both = slice(max(first, second), min(first + len(one), second + len(other)))
    apart = [x[both.start - s : both.stop - s] for x, s in ((one, first), (other, second))]
    found = torch.zeros(1) + (float((apart[0] - apart[1]).abs().max()) if apart[0].numel() else 0)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {"seconds": seconds, "apart": float(found)}


def compared(case: Case, ranks: int, profile: Path, repeat: int) -> dict[str, Any]:
    """Return the row of a case: what both meshes were predicted to take, and what they took."""
    dp = {"dp": ranks // 2} if ranks > 2 else {}
    meshes = [{**dp, "ep": 2, "tp": 1}, {**dp, "tp": 2}]
    most = imbalance(case, meshes[0]["ep"])
    how: Any = {"phase": "prefill", "batch": case.batch, "seq": case.seq, "memory": 1 << 40}
    how |= {"device": str(profile), "expert_imbalance": most}
    plans = [shardwright.plan(config(case), mesh=mesh, **how) for mesh in meshes]
    found = run_processes(ranks, timed, [plan.to_json() for plan in plans], case, repeat)[0]
    return {
        "ranks": ranks, **case._asdict(), "imbalance": round(most, 3),
        "meshes": meshes, "apart": found["apart"],
        "predicted_ms": [plan.predicted.time_ns / 1e6 for plan in plans],
        "measured_ms": [1e3 * statistics.median(s) for s in found["seconds"]],
    }  # fmt: skip


@click.command()
@click.option("--ranks", "sizes", type=int, multiple=True, default=(2, 4), help="Ranks.")
@click.option("--inner", type=int, multiple=True, default=(256, 1024), help="Expert features.")
@click.option("--chosen", type=int, multiple=True, default=(1, 2), help="Experts of a token.")
@click.option("--seq", type=int, multiple=True, default=(128, 512), help="Tokens of a sequence.")
@click.option("--repeat", type=click.IntRange(min=1), default=15, help="Turns.")
@click.option("--turns", type=click.IntRange(min=1), default=60, help="Turns of the calibration.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(
    sizes: tuple[int, ...],
    inner: tuple[int, ...],
    chosen: tuple[int, ...],
    seq: tuple[int, ...],
    repeat: int,
    turns: int,
    path: Path | None,
) -> None:
    """Compare experts over ep with tp, as predicted and as measured."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sizes:
            profile = Path(folder) / f"{ranks}.json"
            profile.write_text(run_processes(ranks, calibrated, turns)[0].model_dump_json())
            for case in (Case(*each) for each in product(inner, chosen, (BATCH,), seq)):
                rows.append(compared(case, ranks, profile, repeat))
                if path:
                    write(path, {"rows": rows})
    Console(width=120).print(table(rows))


def table(rows: list[dict[str, Any]]) -> Table:
    """Format the rows for people."""
    out = Table(title="milliseconds of a prefill: ep, tp, tp / ep", title_justify="left")
    for title in TITLES:
        out.add_column(title, justify="right")
    for row in rows:
        pairs = (row["predicted_ms"], row["measured_ms"])
        figures = (f"{ep:.0f} {tp:.0f} {tp / ep:.2f}" for ep, tp in pairs)
        tokens = f"{row['batch']} x {row['seq']}"
        told = *(str(row[key]) for key in ("ranks", "inner", "chosen")), tokens
        out.add_row(*told, f"{row['imbalance']:.2f}", *figures, f"{row['apart']:.0e}")
    return out


if __name__ == "__main__":
    main()
