"""Train a split model for a few steps, and save a checkpoint that plain transformers loads.

    torchrun --nproc-per-node 2 examples/train.py [DIRECTORY]

The optimizer is torch's own: it sees this rank's part of each parameter and of its gradient. The
unsplit model is trained beside it, to show that both come out alike. No network, no GPU.
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
    eos_token_id=None,
    architectures=["LlamaForCausalLM"],
)
STEPS = 5


def prepare(directory: Path) -> None:
    """Write a checkpoint of random weights, and a plan that is priced for training."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(directory / "checkpoint")
    plan = shardwright.plan(
        directory / "checkpoint", tp=2, objective="memory", phase="train", batch=4, seq=16
    )
    plan.save(directory / "plan.json")


def train(model: Any) -> list[float]:
    """A few steps on made-up data, the same on all ranks; the losses."""
    torch.manual_seed(1)
    ids = torch.randint(CONFIG.vocab_size, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    losses = []
    for _ in range(STEPS):
        loss = model.train()(ids, labels=ids).loss  # whole and right on every rank
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(directory: Path) -> None:
    """What each rank does."""
    plan = directory / "plan.json"
    model: Any = shardwright.load(directory / "checkpoint", plan, device="cpu")
    whole: Any = AutoModelForCausalLM.from_pretrained(directory / "checkpoint")
    losses, wanted = train(model), train(whole)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-4)

    shardwright.save(model, directory / "trained")  # all ranks call it, rank 0 writes
    dist.barrier()
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.3f}" for loss in losses))
        saved = dict(AutoModelForCausalLM.from_pretrained(directory / "trained").named_parameters())
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(saved[name], parameter, rtol=0, atol=1e-3)
        print(f"saved, and read by transformers: {len(saved)} parameters, as trained unsplit")


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
