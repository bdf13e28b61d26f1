"""Runs a rank for `kills.py`: all stages in turn, with one event at which it may be killed.

An event is a call of something that talks to other ranks, or writes or reads a file. A run in which
nobody dies counts the events of a stage.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors import torch as safetensors_torch

import shardwright
from shardwright.runtime.checkpoint import load as loading
from shardwright.runtime.checkpoint import read, source
from shardwright.runtime.communication import collectives, processes
from shardwright.runtime.ranks import peers, rendezvous

EVENTS: dict[str, list[tuple[Any, str]]] = {
    "start": [
        (rendezvous, "_store"),
        (peers.Roll, "enter"),
        (peers.Roll, "read"),
        (dist, "init_process_group"),
        (dist, "all_gather"),
        (processes, "init_device_mesh"),
    ],
    "load": [
        (source.Checkpoint, "open"),
        (source, "read_header"),
        (dist, "all_gather"),
        (read, "stored"),
        (loading, "put"),
    ],
    "forward": [(collectives, "_run")],
    "backward": [(collectives, "_run")],
    "generate": [(collectives, "_run")],
    "save": [
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "write_text"),
        (os, "fsync"),
        (safetensors_torch, "save_file"),
        (collectives, "_run"),
        (dist, "all_gather"),
    ],
}
"""Stage -> the functions that are called in it, and where they are looked up."""


@dataclass(frozen=True)
class Kill:
    """Who is killed and when.

    Attributes:
        stage: One of `EVENTS`.
        victim: The rank.
        event: The event of the stage before which it is killed; -1 for none.
        delay: Seconds into the stage after which it is killed instead; -1 for none.
        stop: Whether it is stopped instead of killed, and hangs.
    """

    stage: str
    victim: int
    event: int = -1
    delay: float = -1.0
    stop: bool = False


def work(folder: Path, ranks: int, kill: Kill, shards: str, timeout: float, short: bool) -> None:
    """Go through all stages, and write the results after each.

    Args:
        folder: Folder with `model`, plans and, after a save, `saved`.
        ranks: Number of ranks.
        kill: Which rank is killed, and when.
        shards: `max_shard_size` of the save.
        timeout: Timeout of `load`.
        short: Whether to leave out the stages between loading and saving.
    """
    out: dict[str, Any] = {}
    rank = int(os.environ["RANK"])
    report = Path(os.environ["REPORT"])
    plan = folder / f"plan-{ranks}.json"
    ids = torch.arange(12).view(2, 6)
    model: Any = None

    def start() -> None:
        whole = shardwright.Plan.load(plan)
        processes.meet(whole, None, torch.device("cpu"), timeout)

    def load() -> None:
        nonlocal model
        model = shardwright.load(folder / "model", plan, timeout=timeout)

    def forward() -> float:
        with torch.no_grad():
            return model(ids).logits.double().pow(2).sum().item()

    def backward() -> list[float]:
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        return [loss.item(), sum(p.grad.abs().sum().item() for p in model.parameters())]

    def generate() -> list[Any]:
        mask = torch.ones_like(ids)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0
        ).tolist()

    def save() -> None:
        shardwright.save(model, folder / "saved", max_shard_size=shards)

    steps: dict[str, Callable[[], Any]] = {"start": start, "load": load, "save": save}
    if not short:
        steps = {"start": start, "load": load, "forward": forward, "backward": backward}
        steps |= {"generate": generate, "save": save}
    for stage, step in steps.items():
        with _counted(stage, kill if kill.victim == rank and kill.stage == stage else None) as seen:
            value = step()
        out[stage] = {"value": value, "events": seen[0]}
        report.write_text(json.dumps(out))


@contextmanager
def _counted(stage: str, kill: Kill | None) -> Iterator[list[int]]:
    """Count the events of a stage, and die at the chosen one."""
    seen = [0]

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kill is not None and seen[0] == kill.event:
                _end(kill)
            seen[0] += 1
            return original(*args, **kwargs)

        return call

    patches = []
    for owner, name in EVENTS[stage]:
        original = vars(owner)[name]
        bound = getattr(owner, name) if isinstance(original, classmethod) else original
        wrapped: Any = counting(bound)
        if isinstance(original, classmethod):
            wrapped = staticmethod(wrapped)
        patches.append(mock.patch.object(owner, name, wrapped))
    if kill is not None and kill.delay >= 0:

        def later() -> None:
            time.sleep(kill.delay)
            _end(kill)

        threading.Thread(target=later, daemon=True).start()
    for patch in patches:
        patch.start()
    try:
        yield seen
    finally:
        for patch in patches:
            patch.stop()


def _end(kill: Kill) -> None:
    os.kill(os.getpid(), signal.SIGSTOP if kill.stop else signal.SIGKILL)
