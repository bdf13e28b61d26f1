"""Train under torchrun, which starts all ranks again when one dies, from the last checkpoint.

    python examples/restart.py DIRECTORY [RANK:STEP...]

Each checkpoint is a folder of its own, which is complete or not there to readers; the newest is
where training goes on. SGD has no state; of other optimizers, save that, too. To show it, a rank is
killed in each of the first starts: RANK before STEP. No network, no GPU.

The ranks call nothing of torch.distributed before `load`, which starts their process group. Torch's
own start may hang where torchrun restarts ranks, since it finds addresses of those that ended.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
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
KILLS = ["1:5", "0:7"]


def prepare(directory: Path) -> None:
    """Write a checkpoint of random weights, and a plan that is priced for training."""
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


def step_of(model: Any, step: int) -> float:
    """Train on the batch of a step, which is the same on all ranks and after a restart."""
    batch = torch.randint(CONFIG.vocab_size, (4, 16), generator=torch.manual_seed(step))
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    loss = model(batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss.item()


def rank(directory: Path, kills: list[str]) -> None:
    """What each rank does, each time that it is started."""
    mine, restarts = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    begun = last(directory)
    if mine == "0":
        print(f"start {restarts} at step {begun}", flush=True)
    # Nobody saves before all have come here, so all have found the same.
    model = shardwright.load(directory / f"step-{begun}", directory / "plan.json", device="cpu")
    for step in range(begun, STEPS):
        if kills[restarts : restarts + 1] == [f"{mine}:{step}"]:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = step_of(model, step)
        if mine == "0":
            print(f"step {step} loss {loss:.6f}", flush=True)
        if (step + 1) % EVERY == 0:
            shardwright.save(model, directory / f"step-{step + 1}")


def main(directory: Path, kills: list[str]) -> None:
    """Start the ranks, and compare their losses with those of the unsplit model."""
    prepare(directory)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(len(kills)), __file__, str(directory), *kills]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    print(out, end="")
    whole = AutoModelForCausalLM.from_pretrained(directory / "step-0")
    wanted = [step_of(whole, step) for step in range(STEPS)]
    found = re.findall(r"step (\d+) loss (\S+)", out)
    for step, loss in found:
        torch.testing.assert_close(float(loss), wanted[int(step)], rtol=0, atol=1e-4)
    starts, steps = len(re.findall("start", out)), len({step for step, _ in found})
    print(f"{starts} starts, {steps} steps, and the losses of a run without restart")


if __name__ == "__main__":
    act = rank if "RANK" in os.environ else main
    act(Path(sys.argv[1]), sys.argv[2:] or KILLS)
