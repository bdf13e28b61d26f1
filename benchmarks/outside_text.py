"""Plans every architecture of transformers outside text from its default config, without inputs.

    python -m benchmarks.outside_text --made              only makes inputs, which is quicker
    python -m benchmarks.outside_text --tp 2 clip vit     plans some
    python -m benchmarks.outside_text --part 1/8 --json FILE

Of each model type one class of the auto mappings is taken, the one with the fullest task. Prints a
row for each; a model that its own default config cannot build is "not built". Exits with 1 if an
error is not one of ours.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from benchmarks.zoo import write
from benchmarks.zoo_ranks import sweep
from shardwright.errors import ShardwrightError
from shardwright.planner.trace.model.source import from_config
from shardwright.planner.trace.runs.example_calls import example_call
from shardwright.runtime.communication.mesh import Mesh
from tests import planning, zoo

TASKS = (
    "CONDITIONAL", "IMAGE_TEXT", "MULTIMODAL", "SPEECH_SEQ", "CTC", "TEXT_TO", "OBJECT_DET",
    "UNIVERSAL", "INSTANCE", "SEMANTIC", "DEPTH", "CLASSIFICATION", "KEYPOINT", "TIME_SERIES",
)  # fmt: skip
"""Words in names of auto mappings: classes of the first are taken first, base classes last."""


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", default=2, show_default=True, help="Ranks to plan for.")
@click.option("--made", is_flag=True, help="Only make inputs.")
@click.option("--part", default="1/1", help="K/N: the Kth of N parts of the model types.")
@click.option("--limit", default=150.0, show_default=True, help="Seconds for a model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(
    names: tuple[str, ...], tp: int, made: bool, part: str, limit: float, path: Path | None
) -> None:
    """Plan what transformers has outside text."""
    k, n = map(int, part.split("/"))
    jobs = [(cls, kind) for kind, cls in classes().items() if not names or kind in names]
    console, rows = Console(stderr=True), []
    found = sweep(jobs[k - 1 :: n], 1, partial(planned, made, tp), 1, limit)
    hidden = not console.is_terminal
    for row in track(found, "planning", len(jobs[k - 1 :: n]), console=console, disable=hidden):
        rows.append(row)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        if path:
            write(path, {"rows": sorted(rows, key=lambda row: row["name"])})
    counts = Counter(row.get("verdict", "raw") for row in rows)
    print(json.dumps(counts))
    sys.exit(1 if counts["raw"] else 0)


def classes() -> dict[str, str]:
    """Return model type -> class, for all types that are not among the text models of the zoo."""
    text = {name for kind in ("causal", "masked", "seq2seq") for name in zoo.names(kind)}
    found: dict[str, list[tuple[int, str]]] = {}
    for mapping, names in vars(modeling_auto).items():
        if not (mapping.startswith("MODEL_") and mapping.endswith("_MAPPING_NAMES")):
            continue
        task = next((i for i, word in enumerate(TASKS) if word in mapping), len(TASKS))
        for kind, of in names.items():
            for cls in of if isinstance(of, tuple) else (of,):
                found.setdefault(kind, []).append((task, cls))
    return {kind: min(of)[1] for kind, of in sorted(found.items()) if kind not in text}


def planned(made: bool, tp: int, cls: str, kind: str, rank: int, ranks: int, mesh: Mesh) -> Any:
    """Return the row of a model type."""
    row: dict[str, Any] = {"kind": cls, "name": kind}
    try:
        config = CONFIG_MAPPING[kind]()
        config.architectures = [cls]
        from_config(copy.deepcopy(config))
    except Exception as error:  # defaults need not fit together, or need other packages
        return row | {"verdict": "not built", "why": _first_line(error)}
    begun = time.process_time()
    try:
        if made:
            inputs = example_call(from_config(config))
            shapes = {n: list(v.shape) for n, v in inputs.items() if isinstance(v, torch.Tensor)}
            row |= {"verdict": "made", "inputs": shapes}
        else:
            plan = planning.plan(config, tp)
            held, whole = plan.predicted.parameter_bytes[0], plan.predicted.unsharded_bytes
            row |= {"verdict": "planned", "share": round(held / whole, 3)}
    except ShardwrightError as error:
        row |= {"verdict": "refused", "why": _first_line(error)}
    return row | {"seconds": round(time.process_time() - begun, 1)}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or '-'}".splitlines()[0][:300]


if __name__ == "__main__":
    main()
