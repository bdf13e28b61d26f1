"""Train and generate for long on two ranks: memory, files, threads and objects do not grow.

    python -m benchmarks.long_run --steps 500 --tokens 2000

Each rank notes what it holds after a tenth of the run, when everything is set up, and at the end.
The numbers of files, threads and tensors must be equal. Memory may be a little more, since
allocators keep some.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SLACK = 16 * 2**20
"""Bytes of memory that a rank may gain until the end."""

TOKENS_A_TURN = 50


@dataclass(frozen=True)
class Held:
    """What a process holds.

    Attributes:
        memory: Resident bytes.
        files: Open files and sockets.
        threads: Threads of the system, not only Python's.
        tensors: Tensors that the garbage collector tracks.
    """

    memory: int
    files: int
    threads: int
    tensors: int

    @classmethod
    def now(cls) -> Held:
        """Measure this process, after a garbage collection."""
        import torch

        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/fd")),  # noqa: PTH208 a number is wanted
            len(os.listdir("/proc/self/task")),  # noqa: PTH208
            tensors,
        )


def work(model: str, plan: str, steps: int, tokens: int) -> dict[str, list[dict[str, int]]]:
    """Return what a rank held early and at the end, for training and for generating."""
    import torch

    import shardwright

    split: Any = shardwright.load(model, plan)
    optimizer = torch.optim.AdamW(split.parameters(), lr=1e-3)

    def train(step: int) -> None:
        ids = torch.randint(256, (2, 16), generator=torch.manual_seed(step))
        split.train()(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def generate(turn: int) -> None:
        ids = torch.randint(256, (1, 8), generator=torch.manual_seed(turn))
        out = split.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS_A_TURN,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape == (1, 8 + TOKENS_A_TURN)

    return {
        "training": _watched(train, steps),
        "generating": _watched(generate, tokens // TOKENS_A_TURN),
    }


def _watched(turn: Callable[[int], None], turns: int) -> list[dict[str, int]]:
    held = []
    for i in range(turns):
        turn(i)
        if i in (max(turns // 10, 1), turns - 1):
            held.append(asdict(Held.now()))
    return held


def growth(early: dict[str, int], late: dict[str, int]) -> list[str]:
    """List what grew, in words."""
    more = {name: late[name] - early[name] for name in early}
    return [f"{n} by {m}" for n, m in more.items() if m > (SLACK if n == "memory" else 0)]


def run(steps: int, tokens: int) -> list[dict[str, list[dict[str, int]]]]:
    """Return what each of two ranks held."""
    import shardwright
    from benchmarks.faults.models import checkpoint
    from shardwright.planner.on_ranks.launch import run_processes

    with tempfile.TemporaryDirectory() as temporary:
        model, plan = checkpoint(Path(temporary) / "model"), Path(temporary) / "plan.json"
        shardwright.plan(model, tp=2, phase="train", objective="memory").save(plan)
        return run_processes(2, work, str(model), str(plan), steps, tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what was held, and fail where something grew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=2000)
    given = parser.parse_args(arguments)
    found = run(given.steps, given.tokens)
    print(json.dumps(found, indent=2))
    grew = [text for rank in found for early, late in rank.values() for text in growth(early, late)]
    print("grew:", ", ".join(grew) or "nothing")
    return bool(grew)


if __name__ == "__main__":
    sys.exit(main())
