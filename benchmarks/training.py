"""Compares ten steps of examples/train_3d.py on meshes of dp, cp and tp with one process.

    python -m benchmarks.training --json FILE      all that FILE has no row for
    python -m benchmarks.training llama --mesh 2x2x2 --dtype float64

A mesh is dp x cp x tp, and each rank is a process of torchrun. Shows the largest differences of the
loss and of the gradient norm over all steps, as a share of the unsharded model's values. Exits with
1 if any exceeds its tolerance.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from transformers import AutoModelForCausalLM

from benchmarks.compare import badness
from benchmarks.demo_launch import RanksFailed, torchrun
from benchmarks.zoo_case import CASTS, EXACT, Casts
from examples import train_3d
from tests import zoo

MODELS = ("llama", "qwen3", "phi3", "gemma2", "mixtral")
MESHES = ("2x2x2", "2x1x2", "1x4x1", "1x2x3")
DTYPES = ("float64", "float32")
STEPS = 10


def write_start(name: str, dtype: torch.dtype, directory: Path, **overrides: Any) -> None:
    """Write a tiny checkpoint of that architecture where the example looks for its start."""
    sizes = {"vocab_size": train_3d.CONFIG.vocab_size, **overrides}
    config, built = zoo.build(name, attn=None, **sizes)
    model: Any = built
    start = directory / "start"
    model.to(dtype).save_pretrained(start)
    if dtype == torch.float64 and hasattr(config, "num_experts_per_tok"):
        # torch's grouped mm has no float64; a config's setting for that is not saved.
        kept = json.loads((start / "config.json").read_text())
        kept["experts_implementation"] = "batched_mm"
        (start / "config.json").write_text(json.dumps(kept))


def unsplit(directory: Path, dtype: torch.dtype) -> tuple[list[tuple[float, float]], float]:
    """Return loss and norm of each step in this process, and the tolerance for others."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory / "start").train()
    optimizer = train_3d.optimizer_of(model)
    with Casts(dtype) as casts:
        made = [train_3d.one_step(model, optimizer, train_3d.batch(i)) for i in range(STEPS)]
    exact = dtype == torch.float64 and not casts.found
    return [(loss.item(), norm.item()) for loss, norm in made], EXACT if exact else CASTS


def split(directory: Path, mesh: str, limit: float) -> list[tuple[float, float]]:
    """Return the same from what the example prints."""
    dp, cp, tp = mesh.split("x")
    sizes = {"DP_SIZE": dp, "CP_SIZE": cp, "TP_SIZE": tp, "STEPS": str(STEPS)}
    with patch.dict(os.environ, sizes):
        ranks = int(dp) * int(cp) * int(tp)
        out = torchrun("examples.train_3d", [directory], ranks=ranks, timeout=limit)
    found = re.findall(r"step \d+ loss (\S+) norm (\S+)", out)
    return [(float(loss), float(norm)) for loss, norm in found]


def row(name: str, dtype: str, mesh: str, limit: float) -> dict[str, Any]:
    """Train one model on one mesh, and compare."""
    begun, kind = time.perf_counter(), getattr(torch, dtype)
    made: dict[str, Any] = {"name": name, "dtype": dtype, "mesh": mesh}
    with tempfile.TemporaryDirectory() as folder:
        write_start(name, kind, Path(folder))
        want, made["tolerance"] = unsplit(Path(folder), kind)
        try:
            found = split(Path(folder), mesh, limit)
        except RanksFailed as error:
            lines = [x for x in str(error).splitlines() if re.search(r"Error\b.*:", x)]
            return made | {"error": lines[0].strip() if lines else str(error)[-200:]}
    assert len(found) == len(want) == STEPS
    for i, figure in enumerate(("loss", "norm")):
        apart = [abs(f[i] - w[i]) / abs(w[i]) for f, w in zip(found, want, strict=True)]
        made[figure] = max(apart, key=badness)
    return made | {"seconds": round(time.perf_counter() - begun, 1)}


def equal(row: dict[str, Any]) -> bool:
    """Return whether all steps are within the tolerance."""
    # Written so that NaN counts as different.
    return "error" not in row and max(row["loss"], row["norm"]) <= row["tolerance"]


def described(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    head = f"{row['name']:10} {row['dtype']:8} {row['mesh']:6}"
    if "error" in row:
        return f"{head} {row['error']}"
    figures = f"{row['loss']:8.0e} {row['norm']:8.0e}  of {row['tolerance']:.0e}"
    return f"{head} {figures} {row['seconds']:6.0f} s  {'equal' if equal(row) else 'DIFFERS'}"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--mesh", "meshes", multiple=True, default=MESHES, help="dp x cp x tp; repeatable.")
@click.option("--dtype", "dtypes", multiple=True, default=DTYPES, help="Repeatable.")
@click.option("--limit", default=600.0, help="Seconds for one.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Results; what it has stays.")
def main(
    names: tuple[str, ...],
    meshes: tuple[str, ...],
    dtypes: tuple[str, ...],
    limit: float,
    path: Path | None,
) -> None:
    """Train on each mesh, and compare with one process."""
    kept = json.loads(path.read_text())["rows"] if path and path.exists() else []
    rows: dict[Any, dict[str, Any]] = {(r["name"], r["dtype"], r["mesh"]): r for r in kept}
    wanted = list(product(names or MODELS, dtypes, meshes))
    for at in wanted if names else [at for at in wanted if at not in rows]:
        rows[at] = row(*at, limit)
        print(described(rows[at]), flush=True)
        if path:
            path.write_text(json.dumps({"rows": list(rows.values())}, indent=1))
    found = [equal(rows[at]) for at in wanted]
    print(f"{sum(found)} of {len(found)} equal")
    sys.exit(0 if all(found) else 1)


if __name__ == "__main__":
    main()
