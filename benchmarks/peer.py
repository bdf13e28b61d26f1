"""Measures transformers' own tensor parallelism, for comparison with ours.

    python -m benchmarks.peer                              every architecture that has a plan
    python -m benchmarks.peer --kind causal llama gemma2   some

Saves a tiny model of each architecture, loads it with `tp_plan="auto"` on real gloo ranks, and
records the collectives of a forward and a backward pass, the bytes that each rank holds, and the
differences of logits and gradients from the unsharded model's. The last result is
`results/peer_tp2.json`, which `benchmarks/zoo.py` compares ours with. transformers needs
accelerate for this.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.utils import is_accelerate_available

from benchmarks.compare import badness, differences, of_all, reference, share_split, weighing_loss
from benchmarks.peer_count import every_collective
from benchmarks.zoo import FIRST, in_order, write
from benchmarks.zoo_case import build
from benchmarks.zoo_ranks import sweep
from shardwright.runtime.communication.audit import Call, counts, total_bytes
from shardwright.runtime.communication.mesh import Mesh
from tests import zoo


def measured(kind: str, name: str, rank: int, tp: int, mesh: Mesh) -> dict[str, Any]:
    """Measure transformers' tensor parallelism on one model; every rank returns the same row.

    The row of an architecture without a plan has only its name. Errors before and in the forward
    pass without gradients are raised.
    """
    del mesh  # transformers makes its own mesh
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tp), "LOCAL_RANK": str(rank)}
    config, whole = build(kind, name, torch.float32)
    row: dict[str, Any] = {"kind": kind, "name": name, "rules": len(whole.tp_plan or {})}
    if not row["rules"]:
        return row
    inputs = zoo.inputs(name, config, kind=kind)
    expected = reference(whole, inputs)
    wanted = DistributedConfig(tp_size=tp, tp_plan="auto")
    with tempfile.TemporaryDirectory() as mine:
        if rank == 0:
            whole.save_pretrained(mine)
        saved = of_all(mine, tp)[0]
        local: Any = type(whole).from_pretrained(
            saved, distributed_config=wanted, dtype=torch.float32
        )
        dist.barrier()
    local.eval()
    row |= {"bytes": max(of_all(_held(local), tp)), "whole_bytes": _held(whole)}
    held = {n: _local(p).numel() for n, p in local.named_parameters()}
    row["split"] = share_split(whole, held, tp)

    torch.manual_seed(0)
    with torch.no_grad(), every_collective() as calls:
        output = local(**inputs)
    row |= _counted("forward", calls)
    logits = _full(zoo.logits(output)).detach()
    row["logits"] = max(of_all(float((logits - expected.logits).abs().max()), tp))

    gradients = expected.gradients
    if gradients is None:
        return row | {"trains": "the whole model has no gradients"}
    try:
        torch.manual_seed(0)
        with every_collective() as calls:
            output = local(**inputs)
        row |= _counted("training_forward", calls)
        loss = weighing_loss(output)
        with every_collective() as calls:
            loss.backward()
        row |= _counted("backward", calls)
        named = local.named_parameters()
        found = {n: _full(p.grad) for n, p in named if p.grad is not None}
    except RuntimeError as error:
        return row | {"trains": _line(error)}
    wrong = differences(found, gradients)
    row["gradients"] = max(of_all(max(wrong.values()), tp), key=badness)
    return row


def _held(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers on this rank, counting shared ones once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in map(_local, tensors))


def _local(x: Any) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _full(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _counted(what: str, calls: list[Call]) -> dict[str, Any]:
    return {what: counts(calls), f"{what}_bytes": total_bytes(calls)}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def table(rows: list[dict[str, Any]], tp: int) -> Table:
    """Format the results for people."""
    out = Table(title=f"transformers' own plans, tp={tp}", title_justify="left")
    out.add_column("MODEL")
    for title in ("LOGITS", "GRADS", "HELD", "SPLIT", "FORWARD", "BACKWARD"):
        out.add_column(title, justify="right")
    out.add_column("")
    show: dict[str, Callable[[Any], str]] = {
        "logits": lambda d: f"{d:.0e}",
        "gradients": lambda d: f"{d:.0e}",
        "share": lambda s: f"{s:.0%}",
        "split": lambda s: f"{s:.0%}",
        "forward": lambda found: str(sum(found.values())),
        "backward": lambda found: str(sum(found.values())),
    }
    for row in rows:
        row = row | ({"share": row["bytes"] / row["whole_bytes"]} if "bytes" in row else {})
        figures = (f(row[key]) if key in row else "-" for key, f in show.items())
        out.add_row(row["name"], *figures, row.get("error", row.get("trains", "")))
    return out


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", default=2, help="Ranks.")
@click.option("--kind", default=None, type=click.Choice(list(FIRST)), help="Only these.")
@click.option("--groups", default=1, help="Models measured at once, each by as many processes.")
@click.option("--limit", default=120.0, help="Seconds for a model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(
    names: tuple[str, ...], tp: int, kind: str | None, groups: int, limit: float, path: Path | None
) -> None:
    """Measure transformers' own tensor parallelism of tiny models on real gloo ranks."""
    if not is_accelerate_available():
        raise click.ClickException(
            "transformers splits no model without accelerate: pip install accelerate"
        )
    kinds = [kind] if kind else list(FIRST)
    jobs = [(k, n) for k in kinds for n in zoo.names(k) if not names or n in names]
    if unknown := set(names) - {n for _, n in jobs}:
        raise click.UsageError(f"no such architectures: {', '.join(sorted(unknown))}")
    done = sweep(jobs, tp, measured, groups, limit)
    console = Console(stderr=True)
    rows = list(
        track(done, "measuring", len(jobs), console=console, disable=not console.is_terminal)
    )
    planned = [
        {key: value for key, value in row.items() if key != "raised"}
        for row in in_order(rows, jobs)
        if row.get("rules") != 0
    ]
    if path:
        write(path, {"tp": tp, "dtype": "float32", "of": len(jobs), "rows": planned})
    Console(width=130).print(table(planned, tp))
    print(f"{len(planned)} of {len(jobs)} have a plan")


if __name__ == "__main__":
    main()
