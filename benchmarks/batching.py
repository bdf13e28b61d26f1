"""Continuous batching of every causal architecture, split over processes, against `generate`.

    python -m benchmarks.batching --tp 2                 all that transformers can batch
    python -m benchmarks.batching --tp 3 llama gemma3_text

`generate_batch` of the split model gets prompts of several lengths, two of which begin alike, and
room for some of them at once. Its tokens are compared with those that the unsplit model generates
from each prompt. Prints each row; `--json FILE` writes them all. "not batched whole": transformers
does not batch the unsplit model, or not to the same tokens. Exits with 1 if tokens differ.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from transformers import ContinuousBatchingConfig, GenerationConfig

import shardwright
from benchmarks.zoo import Row, printed
from benchmarks.zoo_case import build
from benchmarks.zoo_ranks import sweep
from shardwright.errors import ShardwrightError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh
from tests import planning, zoo

NEW_TOKENS = 8
LENGTHS = (5, 19, 3, 12, 19, 8)
SHARED = 16
"""Tokens with which the two longest prompts begin: two pages."""
PAGE, BLOCKS, BATCH = 8, 24, 24
"""Less room than all prompts need at once, so that requests wait for others to end."""
OURS, NOT_BATCHED = "equal", "not batched whole"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", default=2, show_default=True, help="Ranks.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), help="Of the ranks.")
@click.option("--part", default="1/1", help="K/N: the Kth of N parts of the architectures.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(names: tuple[str, ...], tp: int, device: str, part: str, path: Path | None) -> None:
    """Compare continuous batching of split models with the whole ones' tokens."""
    k, n = map(int, part.split("/"))
    chosen = (names or tuple(zoo.names("causal")))[k - 1 :: n]
    found = sweep([("causal", name) for name in chosen], tp, compared, 1, 300.0, device)
    counts = printed(found, "batching", len(chosen), path)
    sys.exit(1 if {*counts} - {OURS, NOT_BATCHED, "refused"} else 0)


def prompts(words: int) -> list[list[int]]:
    """Return prompts for a vocabulary; the two longest begin alike."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(3, words, (SHARED,), generator=generator).tolist()
    drawn = [torch.randint(3, words, (n,), generator=generator).tolist() for n in LENGTHS]
    return [first + p[SHARED:] if len(p) > SHARED else p for p in drawn]


def compared(kind: str, name: str, rank: int, tp: int, mesh: Mesh) -> Row:
    """Return the row of a model; all ranks call it."""
    row: Row = {"name": name, "tp": tp}
    assert mesh.device_mesh is not None
    for dtype in (torch.float64, torch.float32):
        try:
            config, model = build(kind, name, dtype)
            model.to(mesh.device_mesh.device_type)
            asked = prompts(config.get_text_config().vocab_size)
            want = [_generated(model, prompt) for prompt in asked]
            break
        except Exception as error:  # whatever a model raises that cannot
            why = repr(error)[:200]
    else:
        return row | {"verdict": NOT_BATCHED, "why": f"generate: {why}"}
    alone = _alone(model, asked)
    if alone != want:
        return row | {"verdict": NOT_BATCHED, "why": alone if isinstance(alone, str) else "tokens"}
    box: list[Any] = [None]
    if rank == 0:
        try:
            example = zoo.example(name, config, kind, dtype)
            plan = planning.proven(model, tp=tp, kwargs=example, continuous_batching=True)
            box = [plan.to_json()]
        except ShardwrightError as error:
            box = [error]
    dist.broadcast_object_list(box)
    if isinstance(box[0], ShardwrightError):
        return row | {"verdict": "refused", "why": str(box[0])}
    split = shardwright.apply(copy.deepcopy(model), Plan.from_json(box[0]), mesh.device_mesh)
    got = batched(split, asked)
    return row | {"verdict": OURS if got == want else "wrong"}


def _alone(model: Any, asked: list[list[int]]) -> list[list[int]] | str:
    """Return the tokens of continuous batching in one process, or why there are none."""
    size = os.environ.pop("WORLD_SIZE", None)
    try:
        return batched(copy.deepcopy(model), asked)
    except Exception as error:
        return repr(error)[:200]
    finally:
        if size is not None:
            os.environ["WORLD_SIZE"] = size


def batched(model: Any, asked: list[list[int]]) -> list[list[int]]:
    """Return the tokens that continuous batching generates from each prompt."""
    options = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    found = model.generate_batch(
        asked,
        generation_config=options,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=BLOCKS, max_batch_tokens=BATCH
        ),
    )
    if errors := [one.error for one in found.values() if one.error]:
        raise RuntimeError(errors[0])
    return [one.generated_tokens for one in found.values()]


def _generated(model: Any, prompt: list[int]) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, **options, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


if __name__ == "__main__":
    main()
