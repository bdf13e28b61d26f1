"""A rank is killed while it trains, torchrun starts all again, and they go on where they were."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.demo_launch import torchrun
from examples.restart import EVERY, STEPS, batch

RESTARTS = ["--max-restarts", "2", "--monitor-interval", "0.1"]


def losses(out: str) -> dict[int, float]:
    """By step, the last that was printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", out)}


@pytest.mark.parametrize("kill", ["1:5", "0:3"])
def test_losses_are_those_of_a_run_without_restart(tmp_path: Path, kill: str) -> None:
    out = torchrun("examples.restart", [tmp_path, kill], options=RESTARTS)
    steps = [int(step) for step in re.findall(r"step (\d+) loss", out)]
    died = int(kill[2:])
    resumed = died - died % EVERY
    assert steps == [*range(died), *range(resumed, STEPS)], "killed, and went on from a checkpoint"

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "step-0").train()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = whole(batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert losses(out)[step] == pytest.approx(loss.item(), abs=1e-4)
