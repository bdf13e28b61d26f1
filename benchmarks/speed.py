"""How fast a split model is: beside one process, transformers' own split, and its own limit.

    python -m benchmarks.speed [--json FILE] [--ranks 2] [--rounds 4] [--models dense mixture]
    python -m benchmarks.speed --device cuda --dtype bfloat16 --ranks 8 --large --compiled

Models of about 100 M parameters are made for the run (`speed_models.py`), planned for least memory,
and held by processes of one thread: one process, our ranks, and the ranks of transformers' own
tensor parallelism. Measurements are taken in turn, round by round, while all others wait, so that
other work of the machine slows all equally. A ratio is within one round. The table shows the median
and the range of the middle half. On a busy machine the least times say most.

    prefill a prompt of 512 tokens, scores of the last one
    decode  a token with a KV cache, from 64 on
    train   forward and backward of 256 tokens
    load    the model once more, in processes that do nothing else, as users load before they do
            anything; transformers maps files, and reads them later

"all cores" is one process with as many threads as there are cores. "stubbed" are our ranks with
collectives that do not communicate, which is their limit. "functional" uses the collectives of
compiled graphs, over the backend. With --compiled, decode steps of one process and of our ranks are
also timed as one compiled graph each, with a cache of fixed size (on GPUs as CUDA graphs). Counts
are of one run on rank 0 and do not depend on time: ATen calls include views, and allocations are
results in new memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import speed_rank
from benchmarks.demo_launch import free_port

PHASES = ("prefill", "decode", "train", "load")
WAYS: dict[str, tuple[str, str]] = {
    # label -> (what the processes hold, its variant)
    "one": ("one", ""),
    "all cores": ("one", "all cores"),
    "ours": ("ours", ""),
    "transformers": ("transformers", ""),
    "functional": ("ours", "functional"),
    "stubbed": ("ours", "stubbed"),
}
COMPILED: dict[str, tuple[str, str]] = {
    "one, compiled": ("one", "compiled"),
    "ours, compiled": ("ours", "compiled"),
}
LIMIT = 300.0
"""Seconds for one answer."""


class Team:
    """The processes that hold one model in one way; after an error they do nothing else."""

    def __init__(self, way: str, ranks: int, common: dict[str, Any]) -> None:
        self.error: str | None = None
        self.pipes, self.processes = [], []
        context = mp.get_context("spawn")
        port = free_port()
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            job = speed_rank.Job(way=way, rank=rank, ranks=ranks, port=port, **common)
            process = context.Process(target=speed_rank.main, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def ask(self, *command: Any) -> list[Any] | None:
        """Return the answers of all ranks; None if any failed, now or before."""
        if self.error is not None:
            return None
        try:
            for pipe in self.pipes:
                pipe.send(command)
            answers = []
            for pipe in self.pipes:
                if not pipe.poll(LIMIT):
                    raise EOFError
                answers.append(pipe.recv())
        except (EOFError, OSError):
            self.error = "a rank died or hangs"
            return None
        failed = [value for ok, value in answers if not ok]
        self.error = failed[0] if failed else None
        return None if failed else [value for _, value in answers]

    def end(self) -> None:
        """End its processes."""
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def teams(ranks: int, common: dict[str, Any]) -> Iterator[dict[str, Team]]:
    """Yield the processes of all ways."""
    made: dict[str, Team] = {}
    try:
        for way in speed_rank.LOADERS:
            made[way] = Team(way, 1 if way == "one" else ranks, common)
        yield made
    finally:
        for team in made.values():
            team.end()


def loads(
    of: dict[str, Team], seconds: dict[str, list[float]] | None, rounds: int
) -> dict[str, int]:
    """Have each team load its model, and again to fill `seconds`, which the slowest rank sets.

    Returns the anonymous memory in bytes that the first load takes, on the rank with most.
    """
    first = {way: of[way].ask("load") or [] for way in of}
    for _ in range(rounds if seconds is not None else 0):
        for way in of:
            if answers := of[way].ask("load"):
                assert seconds is not None
                seconds[way].append(max(a["seconds"] for a in answers))
    return {way: max(a["anonymous"] for a in found) for way, found in first.items() if found}


def runs(
    of: dict[str, Team],
    ways: dict[str, tuple[str, str]],
    seconds: dict[str, dict[str, list[float]]],
    rounds: int,
    until: float,
) -> None:
    """Run each phase in each way in turn, and record the time of the slowest rank.

    Args:
        of: The processes, which have loaded.
        ways: The ways to measure: who runs, and how.
        seconds: The times by phase and way, to be filled.
        rounds: Number of rounds, after one to warm up.
        until: Monotonic time: no round begins that would end later, but one always runs.
    """
    last = 0.0
    for turn in range(rounds + 1):
        begun = time.monotonic()
        if turn > 1 and begun + last > until:
            break
        for phase, times in seconds.items():
            for way, (who, variant) in ways.items():
                if variant == "compiled" and phase != "decode":
                    continue
                found = of[who].ask("run", phase, variant)
                if found and turn:
                    times[way].append(max(found))
        last = time.monotonic() - begun


def measured(name: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures of one model."""
    begun, share = time.monotonic(), given.minutes * 60 / len(given.models)
    import torch

    from benchmarks import speed_models
    from shardwright import plan

    model, file = folder / name, folder / f"{name}.json"
    size = "tiny" if given.tiny else "large" if given.large else "full"
    ways = {**WAYS, **(COMPILED if given.compiled else {})}
    parameters = speed_models.make(name, size, model, getattr(torch, given.dtype))
    plan(model, tp=given.ranks, objective="memory", phase="prefill,decode,train").save(file)
    common = {"folder": str(model), "plan": str(file), "size": size}
    common |= {"device": given.device, "dtype": given.dtype}
    seconds: dict[str, dict[str, list[float]]]
    seconds = {phase: {way: [] for way in ways} for phase in given.phases}
    with teams(given.ranks, common) as of:
        anonymous = loads(of, seconds.get("load"), given.rounds)
        errors = {way: team.error for way, team in of.items() if team.error}
    steps = {phase: times for phase, times in seconds.items() if phase != "load"}
    counts: dict[str, Any] = {}
    if steps:
        with teams(given.ranks, common) as of:
            for way in of:
                of[way].ask("load")
            runs(of, ways, steps, given.rounds, begun + share)
            for phase in steps:
                counts[phase] = {way: (of[way].ask("count", phase) or [None])[0] for way in of}
            errors |= {way: team.error for way, team in of.items() if team.error}
    return {
        "model": name,
        "parameters": parameters,
        "seconds": seconds,
        "anonymous": anonymous,
        "counts": counts,
        "errors": errors,
    }


def middle(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the median, and the start and end of the middle half."""
    if not values:
        return None
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return statistics.median(values), low, high


def show(row: dict[str, Any]) -> None:
    """Print the figures of a model as tables."""
    ways = next(iter(row["seconds"].values()))
    print(f"\n{row['model']}: {row['parameters'] / 1e6:.0f} M parameters")
    print(f"  {'ms (times as fast as one)':24}" + "".join(f"{way:>25}" for way in ways))
    for phase in row["seconds"]:
        cells = []
        for way in ways:
            mine, one = row["seconds"][phase][way], row["seconds"][phase]["one"]
            time_, ratio = middle(mine), middle([a / b for a, b in zip(one, mine, strict=False)])
            if time_ is None or ratio is None:
                cells.append("-")
            else:
                times = "{:.2f}: {:.2f}-{:.2f}".format(*ratio)
                cells.append(f"{time_[0] * 1e3:.1f} ({times})")
        print(f"  {phase:24}" + "".join(f"{cell:>25}" for cell in cells))
        least = (
            f"{min(mine) * 1e3:.1f}" if mine else "-" for mine in row["seconds"][phase].values()
        )
        print(f"  {'  the least':24}" + "".join(f"{cell:>25}" for cell in least))
    shown = (f"{way} {bytes_ / 2**20:.1f} MiB" for way, bytes_ in row["anonymous"].items())
    print(f"  anonymous memory after loading: {', '.join(shown)}")
    heads = ("python_calls", "aten_calls", "copies", "allocations", "collectives", "bytes")
    print(f"  {'counts':24}" + "".join(f"{head:>14}" for head in heads))
    for phase, ways in row["counts"].items():
        for way, found in ways.items():
            if found:
                cells = "".join(f"{found[head]:>14,}" for head in heads)
                print(f"  {phase + ', ' + way:24}{cells}")
    for way, error in row["errors"].items():
        print(f"  {way} failed: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--models", nargs="+", default=["dense", "fused", "mixture"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=7.0, help="for fewer rounds if need be")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tiny", action="store_true", help="models of no size, to try the script")
    parser.add_argument(
        "--large", action="store_true", help="models for GPUs, of 2,000 M parameters"
    )
    parser.add_argument("--compiled", action="store_true", help="decode steps compiled, too")
    parser.add_argument("--json", type=Path, help="write all figures here")
    given = parser.parse_args(arguments)
    begun, rows = time.monotonic(), []
    for name in given.models:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(name, given, Path(folder)))
        show(rows[-1])
        if given.json:
            about = {"ranks": given.ranks, "device": given.device, "dtype": given.dtype}
            about |= {"cores": os.cpu_count(), "machine": platform.machine()}
            given.json.write_text(json.dumps({"about": about, "models": rows}, indent=1) + "\n")
    print(f"\n{time.monotonic() - begun:.0f} s")
    return int(any(row["errors"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
