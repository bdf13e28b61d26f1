"""Tokens a second of continuous batching: two ranks, one process, and transformers' own TP.

    python -m benchmarks.batching_speed
    python -m benchmarks.batching_speed --turns 3 --width 1024

Each way has processes of its own, with one thread each, which answer 64 requests of mixed lengths
through `generate_batch`. The ways take turns, so that a machine that is slow for a while is slow
for all. Prints the median tokens a second of each, and the median ratio to one process.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import shardwright
from benchmarks.forked import run_forked

WAYS = {"one process": 1, "shardwright": 2, "transformers tp_plan=auto": 2}
"""What is measured, and its ranks."""
REQUESTS, NEW = 64, 24
"""Requests, and the tokens that each is answered with."""
ROOM: Any = {"page_size": 32, "num_blocks": 512, "max_batch_tokens": 512}


@click.command()
@click.option("--turns", default=3, show_default=True, help="How often each way is measured.")
@click.option("--width", default=768, show_default=True, help="Of hidden states.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here.")
def main(turns: int, width: int, path: Path | None) -> None:
    """Measure tokens a second of continuous batching."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, vocab_size=8000,
        eos_token_id=None,
    )  # fmt: skip
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(f"{folder}/model")
        plan = shardwright.plan(
            f"{folder}/model", 2, phase="decode", batch=16, device="cpu-gloo",
            continuous_batching=True,
        )  # fmt: skip
        plan.save(f"{folder}/plan.json")
        for _ in range(turns):
            for way, ranks in WAYS.items():
                out = Path(folder) / "speed.json"
                out.unlink(missing_ok=True)
                ends = run_forked(ranks, measured, (way, folder, str(out)), Path(folder), limit=600)
                if out.exists():
                    found[way].append(json.loads(out.read_text()))
                else:
                    print(way, ends[0].how, ends[0].text or ends[0].log[-500:], file=sys.stderr)
    alone = found["one process"]
    rows = {
        way: {
            "tokens_per_s": round(statistics.median(each), 1),
            "ratio": round(statistics.median(x / y for x, y in zip(each, alone, strict=True)), 2),
        }
        for way, each in found.items()
        if len(each) == len(alone)
    }
    for way, row in rows.items():
        print(f"{way:28} {row['tokens_per_s']:8} tokens/s {row['ratio']:6}")
    if path:
        path.write_text(json.dumps({"ways": rows, "all": found}, indent=1) + "\n")


def requests() -> list[list[int]]:
    """Return prompts of 8 to 100 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 100, (REQUESTS,), generator=generator).tolist()
    return [torch.randint(3, 8000, (n,), generator=generator).tolist() for n in lengths]


def measured(way: str, folder: str, out: str) -> None:
    """Answer all requests, and write the tokens a second. A few requests warm up."""
    directory = f"{folder}/model"
    if way == "shardwright":
        model: Any = shardwright.load(directory, f"{folder}/plan.json")
    elif way == "one process":
        dist.init_process_group("gloo")
        model = AutoModelForCausalLM.from_pretrained(directory)
    else:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        model = AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto", device_mesh=mesh)
    asked = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts, room = requests(), ContinuousBatchingConfig(**ROOM)
    model.generate_batch(prompts[:2], asked, room)
    begun = time.perf_counter()
    answers = model.generate_batch(prompts, asked, room)
    seconds = time.perf_counter() - begun
    tokens = sum(len(one.generated_tokens) for one in answers.values())
    if dist.get_rank() == 0 and tokens == NEW * REQUESTS:
        Path(out).write_text(json.dumps(tokens / seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
