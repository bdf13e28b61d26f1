"""Runs a rank of the demo: loads its shards, runs them, and writes the results.

    torchrun --nproc-per-node 2 -m benchmarks.demo_rank CHECKPOINT PLAN INPUTS OUT

INPUTS is a safetensors file: `prompt` and `sequence` for a model that generates, the tokenizer's
`input_ids` and `attention_mask` for an encoder. rank<N>.safetensors and rank<N>.json go into OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import shardwright
from benchmarks.demo_compute import embed, generate
from benchmarks.loading import local_tensors
from shardwright.runtime.communication.audit import Call, count_collectives, counts


def tell(calls: list[Call]) -> dict[str, Any]:
    """Return collectives as figures."""
    return {"kinds": counts(calls), "bytes": sum(call.bytes for call in calls)}


def run_decoder(
    model: Any, inputs: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Run a generation, a forward over a full sequence, and one decode step with its cache."""
    figures: dict[str, Any] = {}
    tokens = generate(model, inputs["prompt"])
    with count_collectives() as calls:
        logits = model(inputs["sequence"], use_cache=False).logits
    figures["forward"] = tell(calls)
    cache = model(inputs["sequence"][:, :-1], use_cache=True).past_key_values
    with count_collectives() as calls:
        last = model(inputs["sequence"][:, -1:], past_key_values=cache).logits
    figures["decode"] = tell(calls)
    return {"tokens": tokens, "logits": logits, "last": last}, figures


def run_encoder(
    model: Any, inputs: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return one embedding per sentence."""
    with count_collectives() as calls:
        embeddings = embed(model, inputs)
    return {"embeddings": embeddings}, {"forward": tell(calls)}


def main() -> None:
    """Run one rank."""
    checkpoint, plan, file, out = map(Path, sys.argv[1:])
    inputs = load_file(file)
    model = shardwright.load(checkpoint, plan)
    with torch.no_grad():
        results, figures = (run_decoder if "prompt" in inputs else run_encoder)(model, inputs)
    rank = dist.get_rank()
    held = {t.data_ptr(): t.nbytes for t in local_tensors(model)}
    figures |= {
        "rank": rank,
        "held": sum(held.values()),
        "read": model.shardwright_report.read,  # type: ignore[union-attr]
    }
    save_file({k: v.contiguous() for k, v in results.items()}, out / f"rank{rank}.safetensors")
    (out / f"rank{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
