"""Plans every architecture of transformers outside text from its default config, without inputs.

    python -m benchmarks.outside_text --made              only makes inputs, which is quicker
    python -m benchmarks.outside_text --tp 2 clip vit     plans some
    python -m benchmarks.outside_text --part 1/8 --json FILE
    python -m benchmarks.outside_text --equal clip         compares small models (outside_equal.py)
    python -m benchmarks.outside_text --timed clip         plans them as users do, and times that

Of each model type one class of the auto mappings is taken, the one with the fullest task. Prints a
row for each; a model that its own default config cannot build is "not built". Exits with 1 if an
error is not one of ours.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from transformers import CONFIG_MAPPING, utils
from transformers.models.auto import modeling_auto
from transformers.utils import import_utils

from benchmarks.outside_equal import compared, timed
from benchmarks.uses.models import APART, with_torchvision
from benchmarks.zoo import Row, printed
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


with with_torchvision():
    import timm  # noqa: F401  # pyright: ignore[reportMissingImports]
sys.path.append(str(APART))  # timm and scipy, which some models need
import_utils.is_timm_available = utils.is_timm_available = lambda: True  # though no torchvision is
backends: Any = import_utils.BACKENDS_MAPPING
backends["timm"] = (lambda: True, "")


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", default=2, show_default=True, help="Ranks to plan for.")
@click.option("--made", is_flag=True, help="Only make inputs.")
@click.option("--equal", is_flag=True, help="Compare small models with the unsharded ones.")
@click.option("--timed", "times", is_flag=True, help="Plan small models, and time that.")
@click.option("--part", default="1/1", help="K/N: the Kth of N parts of the model types.")
@click.option("--limit", default=150.0, show_default=True, help="Processor seconds for a model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(
    names: tuple[str, ...],
    tp: int,
    made: bool,
    equal: bool,
    times: bool,
    part: str,
    limit: float,
    path: Path | None,
) -> None:
    """Plan what transformers has outside text."""
    k, n = map(int, part.split("/"))
    jobs = [(cls, kind) for kind, cls in classes().items() if not names or kind in names]
    jobs = jobs[k - 1 :: n]
    row = partial(planned, made, tp)
    if equal or times:
        row = partial(small_row, equal, times, tp)
    found = sweep(jobs, 1, row, 1, limit)
    counts = printed(found, "planning", len(jobs), path)
    sys.exit(1 if counts["failed"] else 0)


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


def planned(made: bool, tp: int, cls: str, kind: str, rank: int, ranks: int, mesh: Mesh) -> Row:
    """Return the row of a model type."""
    row: Row = {"kind": cls, "name": kind}
    try:
        config = CONFIG_MAPPING[kind]()
        config.architectures = [cls]
        model = from_config(config)
    except Exception as error:  # defaults need not fit together, or need other packages
        return row | {"verdict": "not built", "why": repr(error)[:300]}
    begun = time.process_time()
    try:
        if made:
            inputs = example_call(model)
            shapes = {n: list(v.shape) for n, v in inputs.items() if isinstance(v, torch.Tensor)}
            row |= {"verdict": "made", "inputs": shapes}
        else:
            plan = planning.proven(config, tp)
            held, whole = plan.predicted.parameter_bytes[0], plan.predicted.unsharded_bytes
            row |= {"verdict": "planned", "share": round(held / whole, 3)}
    except ShardwrightError as error:
        row |= {"verdict": "refused", "why": repr(error)[:300]}
    return row | {"seconds": round(time.process_time() - begun, 1)}


def small_row(equal: bool, times: bool, tp: int, cls: str, kind: str, *_: Any) -> Row:
    """Return the row of a small model of a type: whether it is equal, how long planning takes."""
    begun = time.process_time()
    answers = [answer for asked, answer in ((equal, compared), (times, timed)) if asked]
    first, *others = [answer(kind, cls, tp) for answer in answers]
    more = {name: value for other in others for name, value in other.items()}
    seconds = round(time.process_time() - begun, 1)
    return {"kind": cls, "name": kind, "seconds": seconds} | more | first


if __name__ == "__main__":
    main()
