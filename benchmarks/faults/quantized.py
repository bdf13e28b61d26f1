"""Mutated quantized checkpoints: `load` refuses one, or computes weights of the right shapes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import shardwright
from benchmarks.faults.checkpoints import (
    RANKS,
    SECONDS,
    VALUES,
    in_header,
    local_part,
    mutated_json,
    written,
)
from benchmarks.faults.outcomes import Tally, Wrong
from benchmarks.quantize import HOW, quantize
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh


def campaign(count: int, seed: int) -> Iterator[tuple[str, Tally]]:
    """The tally of each kind of file of quantized checkpoints: refused, or read as another.

    What config and headers say together is what the numbers are, so these are not compared.
    """
    with tempfile.TemporaryDirectory() as name:
        for how in HOW:
            whole, random = Path(name) / how, Random(f"{seed} {how}")
            written(whole)
            quantize(whole, how)
            plan, tally = shardwright.plan(whole, RANKS, objective="memory"), Tally()
            for n in range(count // len(HOW)):
                folder = Path(name) / "mutant"
                shutil.copytree(whole, folder)
                what = (in_quantization if n % 2 else in_header)(random, folder)
                tally.take(what, SECONDS, lambda f=folder, p=plan: read(f, p))
                shutil.rmtree(folder)
            yield f"quantized, {how}", tally


def read(folder: Path, plan: Plan) -> None:
    """Load each rank's part, and compute its weights.

    Raises:
        ShardwrightError: it was refused.
        Wrong: a weight is not of the shape that the rank should have.
    """
    for rank in range(RANKS):
        mesh = Mesh.shape_only({"tp": (rank, RANKS)})
        model = local_part(folder, plan, mesh, keep=bool(rank))
        for parameter in model.parameters():
            if (parameter.detach() + 0).shape != parameter.shape:
                raise Wrong(f"{list(parameter.shape)} is computed in another shape")


def in_quantization(random: Random, folder: Path) -> str:
    """Something in the quantization_config is another, or all of it."""
    file = folder / "config.json"
    config = json.loads(file.read_bytes())
    text, words = mutated_json(random, json.dumps(config["quantization_config"]).encode())
    try:
        config["quantization_config"] = json.loads(text)
    except (ValueError, RecursionError):
        config["quantization_config"] = random.choice(VALUES)
    file.write_text(json.dumps(config))
    return f"quantization_config: {words}"
