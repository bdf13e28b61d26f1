"""Plan a checkpoint for two ranks, load each rank's part of it, generate, compare with the whole.

    torchrun --nproc-per-node 2 examples/generate.py [DIRECTORY]

It makes a small checkpoint of random weights, so it needs no network and no GPU. With DIRECTORY,
the checkpoint and the plan stay there to be looked at: `shardwright show DIRECTORY/plan.json`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import shardwright

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=160,
    initializer_range=0.2,
    eos_token_id=None,
    architectures=["LlamaForCausalLM"],
)


def prepare(directory: Path) -> None:
    """Write a checkpoint of random weights and a plan for it into `directory`.

    With a model of your own: `shardwright plan MODEL --tp 2 -o plan.json`, on any machine.
    """
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(directory / "checkpoint")
    plan = shardwright.plan(directory / "checkpoint", tp=2, objective="memory")
    plan.save(directory / "plan.json")
    print(f"planned by {plan.solver.name}, {plan.solver.status}")


def main(directory: Path) -> None:
    """What each rank does."""
    plan = directory / "plan.json"
    model: Any = shardwright.load(directory / "checkpoint", plan, device="cpu")
    held = sum(p.to_local().nbytes for p in model.parameters())

    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])  # the same on all ranks
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    whole: Any = AutoModelForCausalLM.from_pretrained(directory / "checkpoint")
    wanted = whole.generate(ids, attention_mask=torch.ones_like(ids), **options)
    share = held / sum(p.nbytes for p in whole.parameters())
    print(f"rank {dist.get_rank()}: holds {share:.1%}, tokens {tokens[0, 4:].tolist()}")
    assert torch.equal(tokens, wanted), "the split model generates other tokens"
    if dist.get_rank() == 0:
        print("the same tokens as the unsplit model")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as temporary:
        place = [sys.argv[1] if len(sys.argv) > 1 else temporary]
        dist.broadcast_object_list(place)  # that of rank 0, for all
        if dist.get_rank() == 0:
            prepare(Path(place[0]))
        dist.barrier()
        main(Path(place[0]))
        dist.barrier()  # nobody leaves, and removes the files, while others read
    dist.destroy_process_group()
