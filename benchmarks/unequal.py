"""Times a step of two CPU ranks of which one is half as fast, with equal and with unequal parts.

    python -m benchmarks.unequal

The second rank is stopped and continued every few milliseconds (SIGSTOP, SIGCONT), so it gets half
the time. Both plans run in turn in the same processes, and their logits must be equal. Needs two
idle cores.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist
import transformers

import shardwright
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.on_ranks.launch import run_processes

SLICE = 0.004
"""Seconds that the slow rank runs, and then stands."""
SPEEDS = (1.0, 0.5)
TOKENS = 256
CONFIG = transformers.LlamaConfig(
    hidden_size=1152, intermediate_size=4608, num_hidden_layers=6, num_attention_heads=24,
    num_key_value_heads=12, vocab_size=12000, architectures=["LlamaForCausalLM"],
    dtype=torch.float32,
)  # fmt: skip


def slow_down() -> int:
    """Fork a process that stops and continues this one in turn, and return its number."""
    process = os.getpid()
    if (child := os.fork()) > 0:
        return child

    def end(*_: Any) -> None:
        os.kill(process, signal.SIGCONT)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    try:
        while True:
            time.sleep(SLICE)
            os.kill(process, signal.SIGSTOP)
            time.sleep(SLICE)
            os.kill(process, signal.SIGCONT)
    except ProcessLookupError:
        os._exit(0)


def timed(plans: list[Plan], rounds: int) -> tuple[list[list[float]], float]:
    """Return the seconds of steps of each plan, and the largest difference of logits."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(CONFIG).eval()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    models = [shardwright.apply(copy.deepcopy(whole), plan, mesh) for plan in plans]
    ids = torch.arange(TOKENS).view(1, -1) % CONFIG.vocab_size
    slow = slow_down() if dist.get_rank() == 1 else None
    seconds: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        expected: Any = whole(ids, use_cache=False).logits
        found = [model(ids, use_cache=False).logits for model in models]
        for _ in range(rounds):
            for times, model in zip(seconds, models, strict=True):
                dist.barrier()
                begun = time.perf_counter()
                model(ids, use_cache=False)
                times.append(time.perf_counter() - begun)
    if slow is not None:
        os.kill(slow, signal.SIGTERM)
        os.waitpid(slow, 0)
    return seconds, max(float((logits - expected).abs().max()) for logits in found)


@click.command()
@click.option("--rounds", default=20, show_default=True, help="Steps of each plan.")
def main(rounds: int) -> None:
    """Time equal and unequal parts."""
    how: Any = {"tp": 2, "seq": TOKENS, "device": "cpu-gloo"}
    plans = [shardwright.plan(CONFIG, **how), shardwright.plan(CONFIG, speeds=SPEEDS, **how)]
    answers = run_processes(2, timed, plans, rounds)
    seconds, _ = answers[0]
    even, parts = map(median, seconds)
    click.echo(f"speeds {SPEEDS}: parts {plans[1].workload.shares}")
    click.echo(f"equal parts    {1e3 * even:.0f} ms a step")
    click.echo(f"unequal parts  {1e3 * parts:.0f} ms a step, {1 - parts / even:.0%} less")
    click.echo(f"logits differ by at most {max(error for _, error in answers):.1e}")


if __name__ == "__main__":
    main()
