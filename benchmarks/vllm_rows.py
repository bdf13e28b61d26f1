"""Requests in one row of every causal architecture, split as for vLLM, without vLLM.

    python -m benchmarks.vllm_rows --tp 2
    python -m benchmarks.vllm_rows --tp 3 llama stablelm

An engine of a few lines calls the split model as vLLM does: prompts and single tokens of several
requests in a row, with keys and values in a cache of its own. Its tokens are compared with those
that the unsplit model generates. Prints each row; `--json FILE` writes them all. Exits with 1 if
tokens differ.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F

import shardwright
from benchmarks.zoo import Row, printed
from benchmarks.zoo_case import build
from shardwright.errors import ShardwrightError
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.in_vllm.attention import Attends, LayerAttention
from shardwright.runtime.in_vllm.row_model import RowModel
from tests import planning, zoo
from tests.ranks import run_ranks

NEW_TOKENS = 6
PROMPTS = ([5, 9, 11, 4, 7, 13, 6], [8, 3, 21], [17])
LONGEST = 64


@dataclass
class Kept(Attends):
    """Attends with keys and values that it keeps for each request."""

    layers: dict[int, LayerAttention]
    kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    row: list[tuple[int, int]] = field(default_factory=list)
    """Of each request in the row, in their order, its number and its tokens."""

    def mask(self, own: Callable[..., Tensor | None], how: dict[str, Any]) -> None:
        """Make none."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, how: Any) -> Tensor:
        """Attend to what is kept of each request."""
        asked, outputs = self.layers[module.layer_idx], []
        parts = (x.split([n for _, n in self.row], 2) for x in (query, key, value))
        for (request, _), q, k, v in zip(self.row, *parts, strict=True):
            at = (module.layer_idx, request)
            if at in self.kept:
                k, v = (torch.cat(pair, 2) for pair in zip(self.kept[at], (k, v), strict=True))
            self.kept[at] = k, v
            places = torch.arange(k.shape[2])
            back = places[-q.shape[2] :, None] - places
            sees = (back >= 0) & (back < (asked.window or LONGEST))
            times = q.shape[1] // max(k.shape[1], 1)
            k, v = (x.repeat_interleave(times, 1) for x in (k, v))
            outputs.append(F.scaled_dot_product_attention(q, k, v, sees, scale=asked.scale))
        return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def generated(model: RowModel) -> list[list[int]]:
    """Return the tokens that follow each prompt; a request more joins at each step."""
    attends, out = Kept(model.layers), [[] for _ in PROMPTS]
    for step in range(NEW_TOKENS + len(PROMPTS)):
        turn = [i for i in range(min(step + 1, len(PROMPTS))) if len(out[i]) < NEW_TOKENS]
        if not turn:
            break
        new = [out[i][-1:] or list(PROMPTS[i]) for i in turn]
        before = [len(PROMPTS[i]) + len(out[i]) - 1 if out[i] else 0 for i in turn]
        attends.row = [(i, len(tokens)) for i, tokens in zip(turn, new, strict=True)]
        places = [torch.arange(len(t)) + b for t, b in zip(new, before, strict=True)]
        hidden = model.hidden(attends, torch.tensor(sum(new, [])), torch.cat(places))
        last = torch.tensor([len(t) for t in new]).cumsum(0) - 1
        for i, token in zip(turn, model.logits(hidden[last]).argmax(-1).tolist(), strict=True):
            out[i].append(token)
    return out


def followed(model: Any) -> list[list[int]]:
    """Return the tokens that follow each prompt, without any cache."""
    out = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        out.append(tokens[len(prompt) :])
    return out


def compared(name: str, tp: int) -> Row:
    """Return the row of an architecture."""
    row: Row = {"name": name, "tp": tp}
    config, model = build("causal", name, torch.float64)
    try:
        with torch.no_grad():
            want = followed(model)
    except Exception as error:
        return row | {"verdict": "not run whole", "why": repr(error)[:200]}
    try:
        example = zoo.example(name, config, "causal", torch.float64)
        plan = planning.proven(model, tp=tp, kwargs=example)

        def work(mesh: Mesh) -> list[list[int]]:
            split = shardwright.apply(copy.deepcopy(model), plan, mesh)
            with torch.no_grad():
                return generated(RowModel(split, copy.deepcopy(model).to("meta"), LONGEST))

        found = run_ranks(tp, work)
    except ShardwrightError as error:
        return row | {"verdict": "refused", "why": str(error)[:200]}
    return row | {"verdict": "equal" if all(each == want for each in found) else "wrong"}


def row_of(name: str, tp: int) -> Row:
    """Return the row of an architecture, whatever its code raises."""
    try:
        return compared(name, tp)
    except Exception as error:  # no error of ours
        return {"name": name, "tp": tp, "verdict": "raw", "why": repr(error)[:300]}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", default=2, show_default=True, help="Ranks.")
@click.option("--part", default="1/1", help="K/N: the Kth of N parts of the architectures.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(names: tuple[str, ...], tp: int, part: str, path: Path | None) -> None:
    """Compare tokens of rows of split models with those of the unsplit ones."""
    k, n = map(int, part.split("/"))
    chosen = (names or tuple(zoo.names("causal")))[k - 1 :: n]
    counts = printed((row_of(name, tp) for name in chosen), "rows", len(chosen), path)
    sys.exit(1 if {"wrong", "raw"} & {*counts} else 0)


if __name__ == "__main__":
    main()
