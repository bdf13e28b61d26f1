"""Compares every mixture of the zoo, its experts spread over ranks, with one process.

    python -m benchmarks.experts                              on ep=2,tp=2
    python -m benchmarks.experts --mesh dp=2,ep=2,tp=1 qwen3_moe
    python -m benchmarks.experts --mesh ep=4,tp=1 --json FILE

Logits and all gradients in float64, on threads of one process; each copy of the model takes other
sequences. Code that computes in float32 itself rounds there, and a model that does not run in
float64 is compared in float32. A mixture without a module that tokens
can be sent to is refused. Exits with 1 if one is not equal, or if an error is not one of ours.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import click
import torch

import shardwright
from benchmarks.zoo import Row, printed
from benchmarks.zoo_ranks import sweep
from shardwright.errors import ShardwrightError, first_line
from shardwright.planner.contract.mesh import mesh_text, parse_mesh, replicas
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning, zoo
from tests.ranks import copy_number, run_ranks

ROWS, TOKENS = 2, 12
EQUAL = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest difference of logits, and of gradients relative to their parameter's largest entry."""
TIME_LIMIT = 240.0
"""Seconds for a plan: those with most ops come to the default on a busy machine."""
FLOOR = 1e-2
"""Gradients whose largest entry is smaller are compared with this."""


@click.command()
@click.argument("names", nargs=-1)
@click.option("--mesh", "text", default="ep=2,tp=2", show_default=True, help="Mesh dims and ranks.")
@click.option("--limit", default=300.0, show_default=True, help="Seconds for a model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(names: tuple[str, ...], text: str, limit: float, path: Path | None) -> None:
    """Compare mixtures whose experts are spread over ranks with one process."""
    mesh = parse_mesh(text)
    jobs = [("causal", name) for name in names or mixtures()]
    found = sweep(jobs, 1, partial(compared, mesh), 1, limit)
    counts = printed(found, "comparing", len(jobs), path)
    sys.exit(1 if counts["failed"] or counts["unequal"] else 0)


def mixtures() -> list[str]:
    """Return the models of the zoo whose config counts experts."""
    words = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    configs = {name: zoo.tiny_config(name).get_text_config() for name in zoo.names("causal")}
    return [name for name, config in configs.items() if any(map(config.to_dict().get, words))]


def compared(dims: dict[str, int], kind: str, name: str, rank: int, ranks: int, mesh: Mesh) -> Row:
    """Return the row of a model."""
    row: Row = {"name": name, "mesh": mesh_text(dims)}
    try:
        worst, held, dtype = differences(name, dims)
    except ShardwrightError as error:
        return row | {"verdict": "refused", "why": f"{first_line(error):.300}"}
    verdict = "equal" if max(worst.values()) <= EQUAL[dtype] else "unequal"
    row |= {"dtype": str(dtype).removeprefix("torch.")}
    return row | {"verdict": verdict, "held": held} | {k: f"{v:.0e}" for k, v in worst.items()}


def differences(name: str, dims: dict[str, int]) -> tuple[dict[str, float], float, torch.dtype]:
    """Return the largest differences, the largest share of the parameters on a rank, and dtype."""
    model: Any = zoo.build(name)[1]
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    copies = replicas(dims)
    ids = torch.randint(3, 100, (ROWS * copies, TOKENS), generator=torch.Generator().manual_seed(0))
    dtype, whole, want = _unsplit(model, ids)
    plan = planning.proven(
        model.to(dtype), mesh=dims, phase="train", batch=ROWS * copies, time_limit=TIME_LIMIT
    )
    gradients = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}

    def work(at: Mesh) -> dict[str, float]:
        local = shardwright.apply(copy.deepcopy(model), plan, at)
        part = copy_number(at)
        logits = _trained(local, ids.chunk(copies)[part])
        found: Any = full_tensors(local, {n: p.grad for n, p in local.named_parameters()})
        apart = [
            float((found[n] - g).abs().max()) / max(float(g.abs().max()), FLOOR)
            for n, g in gradients.items()
        ]
        ahead = float((logits - want.chunk(copies)[part]).abs().max())
        return {"logits": ahead, "gradients": max(apart)}

    every = run_ranks(prod(dims.values()), work, dims)
    predicted = plan.predicted
    held = round(max(predicted.parameter_bytes) / predicted.unsharded_bytes, 3)
    return {key: max(each[key] for each in every) for key in every[0]}, held, dtype


def _unsplit(
    model: torch.nn.Module, ids: torch.Tensor
) -> tuple[torch.dtype, torch.nn.Module, torch.Tensor]:
    """Return the first dtype in which a model runs, the model after a backward pass, and logits."""
    *others, last = EQUAL
    for dtype in others:
        whole = copy.deepcopy(model).to(dtype)
        try:
            return dtype, whole, _trained(whole, ids)
        except RuntimeError:  # its code makes tensors of another dtype
            continue
    whole = copy.deepcopy(model).to(last)
    return last, whole, _trained(whole, ids)


def _trained(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return logits after a backward pass of a mean in which each of them counts differently."""
    logits = model(ids, use_cache=False).logits
    weights = torch.sin(torch.arange(logits[0].numel(), dtype=logits.dtype)).view(logits[0].shape)
    (logits * weights).sum((1, 2)).mean().backward()
    return logits.detach()


if __name__ == "__main__":
    main()
