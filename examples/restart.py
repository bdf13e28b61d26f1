"""Train under a launcher that starts all ranks again when one dies, from the last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/restart.py DIRECTORY [RANK:STEP]

Each checkpoint is a folder of its own, which is complete or not there to readers; the newest
complete one is where training goes on. SGD has no state; of other optimizers, save that, too. With
RANK:STEP that rank is killed once before that step, to show it. No network, no GPU.
"""

from __future__ import annotations

import os
import signal
import sys
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
STEPS, EVERY = 8, 2


def prepare(directory: Path) -> None:
    """Write a checkpoint of random weights, and a plan that is priced for training."""
    if not (directory / "plan.json").exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(directory / "step-0")
        plan = shardwright.plan(
            directory / "step-0", tp=2, phase="train", batch=4, seq=16, objective="memory"
        )
        plan.save(directory / "plan.json")


def last(directory: Path) -> int:
    """The step of the newest checkpoint that is complete: that is, has weights or their index."""
    complete = directory.glob("step-*/model.safetensors*")
    return max(int(path.parent.name.removeprefix("step-")) for path in complete)


def batch(step: int) -> torch.Tensor:
    """The batch of a step, the same on all ranks and after a restart."""
    return torch.randint(CONFIG.vocab_size, (4, 16), generator=torch.manual_seed(step))


def main(directory: Path, kill: str = "") -> None:
    """What each rank does, each time that it is started."""
    rank, first_time = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if rank == 0:
        prepare(directory)
    dist.barrier()
    begun = last(directory)
    dist.barrier()  # nobody saves before all have looked
    model: Any = shardwright.load(directory / f"step-{begun}", directory / "plan.json")
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    for step in range(begun, STEPS):
        if first_time and kill == f"{rank}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if (step + 1) % EVERY == 0:
            shardwright.save(model, directory / f"step-{step + 1}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), *sys.argv[2:])
    dist.barrier()
    dist.destroy_process_group()
