"""Kill a rank at any time: the others end soon, with one line that names it, and nothing is mixed.

    python -m benchmarks.kills --kills 60 --saves 40 --seed 0

Ranks of a tiny model start, load, compute, generate and save over an older checkpoint. One of them
is killed before a random event (a collective, a file that is read or written) or after a random
time, or it stops and hangs. These outcomes are counted as faults:

wrong       a rank went on and got other numbers
raw         a rank ended in an exception that is not ours, or in an error of several lines
hang        a rank did not end soon after its timeout: a process would be left
misblamed   a rank named another rank as the one that is gone
mixed       the folder held neither the full old checkpoint nor the full new one
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.faults.models import checkpoint
from benchmarks.forked import Ended, agent_store, run_forked
from benchmarks.kills_rank import EVENTS, Kill, work

TIMEOUT = 8.0
SLACK = 40.0
"""Seconds that a rank may take beyond its timeout: time to compute, on a busy machine."""

SHARDS = ("5GB", "60KB")


@dataclass(frozen=True)
class Case:
    """One kill: the number of ranks, when, and how the checkpoint is cut into files."""

    ranks: int
    kill: Kill
    shards: str = SHARDS[0]
    short: bool = False
    agent: bool = False
    """Whether another process keeps the store, as under torchrun, instead of rank 0."""


@dataclass
class Outcome:
    """The faults of a case: words of the list above, with what was seen."""

    case: Case
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Kills:
    """A folder with a model and its plans, and the results when nobody dies."""

    def __init__(self, folder: Path, ranks: Sequence[int] = (2, 4)) -> None:
        self.folder = folder
        _prepare(folder, ranks)
        self.healthy: dict[tuple[int, bool], list[dict[str, Any]]] = {}
        self.old, self.new = _values(folder / "old"), dict[tuple[int, bool], dict[str, float]]()
        for n in ranks:
            for short in (False, True):
                nobody = Case(n, Kill("save", -1), short=short)
                ends = self._run(nobody)
                if bad := [e for e in ends if e.how != "well"]:
                    raise RuntimeError(f"fails where nobody is killed: {bad[0]}")
                self.healthy[n, short] = [self._report(rank) for rank in range(n)]
                self.new[n, short] = _values(folder / "saved")

    def cases(self, kills: int, saves: int, seed: int) -> Iterator[Case]:
        """Yield seeded cases: `kills` over all stages, then `saves` in save, half of rank 0."""
        draw, ranks = random.Random(seed), sorted({n for n, _ in self.healthy})
        stages = list(EVENTS)
        for i in range(kills):
            n, stage = ranks[i % len(ranks)], stages[i // len(ranks) % len(stages)]
            kill = self._kill(draw, n, stage, draw.randrange(n), False)
            # Torch waits forever for a store that hangs.
            agent = draw.random() < 0.5 or (kill.stop and kill.victim == 0)
            yield Case(n, kill, agent=agent)
        for i in range(saves):
            n = ranks[i % len(ranks)]
            victim = 0 if i % 4 < 2 else draw.randrange(n)
            kill = self._kill(draw, n, "save", victim, True)
            yield Case(n, kill, SHARDS[i // 4 % 2], short=True, agent=draw.random() < 0.5)

    def _kill(self, draw: random.Random, ranks: int, stage: str, victim: int, short: bool) -> Kill:
        events = self.healthy[ranks, short][victim][stage]["events"]
        how = draw.random()
        if how < 0.7:
            return Kill(stage, victim, event=draw.randrange(events), stop=how < 0.05)
        return Kill(stage, victim, delay=draw.uniform(0, 0.15))

    def run(self, case: Case) -> Outcome:
        """Run one case and judge it."""
        ends = self._run(case)
        out = Outcome(case, seconds=max(e.seconds for e in ends))
        healthy = self.healthy[case.ranks, case.short]
        for rank, end in enumerate(ends):
            if rank == case.kill.victim:
                continue
            if end.how == "hangs":
                out.wrong.append(f"hang of rank {rank}: {end.log[-500:]}")
            elif end.how in ("raw", "killed") or "\n" in end.text or "Traceback" in end.log:
                out.wrong.append(f"raw on rank {rank} ({end.how}): {end.text} {end.log[-500:]}")
            named = re.search(r"(?:no answer from|on rank \d+:) (ranks? [\d, ]+\d)", end.text)
            if named and named[1] != f"rank {case.kill.victim}":
                out.wrong.append(f"misblamed by rank {rank}: {end.text}")
            for stage, got in self._report(rank).items():
                if got["value"] != healthy[rank][stage]["value"]:
                    out.wrong.append(f"wrong on rank {rank} in {stage}: {got['value']}")
        try:
            held = _values(self.folder / "saved")
        except Exception as error:
            out.wrong.append(f"mixed: cannot be loaded: {error}")
        else:
            if held not in (self.old, self.new[case.ranks, case.short]):
                out.wrong.append("mixed: neither the old nor the new checkpoint")
        return out

    def _run(self, case: Case) -> list[Ended]:
        saved = self.folder / "saved"
        shutil.rmtree(saved, ignore_errors=True)
        shutil.copytree(self.folder / "old", saved)
        for rank in range(case.ranks):
            self._path(rank).unlink(missing_ok=True)
        args = (self.folder, case.ranks, case.kill, case.shards, TIMEOUT, case.short)
        environ = [{"REPORT": str(self._path(rank))} for rank in range(case.ranks)]
        return run_forked(
            case.ranks,
            work,
            args,
            self.folder,
            limit=TIMEOUT + SLACK,
            environ=environ,
            agent=agent_store() if case.agent else None,
            doomed=case.kill.victim if case.kill.stop else None,
        )

    def _path(self, rank: int) -> Path:
        return self.folder / f"report-{rank}.json"

    def _report(self, rank: int) -> dict[str, Any]:
        path = self._path(rank)
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError):
            return {}


def _prepare(folder: Path, ranks: Sequence[int]) -> None:
    import shardwright

    checkpoint(folder / "model")
    checkpoint(folder / "old", seed=1)
    for n in ranks:
        shardwright.plan(folder / "model", tp=n, objective="memory").save(folder / f"plan-{n}.json")


def _values(folder: Path) -> dict[str, float]:
    """Return each parameter's sum of magnitudes in a checkpoint, as transformers loads it."""
    from transformers import LlamaForCausalLM

    from shardwright.runtime.checkpoint.source import Checkpoint

    assert Checkpoint.open(folder).tensors
    model = LlamaForCausalLM.from_pretrained(folder)
    # Ranks differ in the last digits of gradients.
    return {n: round(p.abs().double().sum().item(), 3) for n, p in model.named_parameters()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign and print what was counted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--saves", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    given = parser.parse_args(arguments)
    disable_progress_bar()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        kills = Kills(Path(temporary), given.ranks)
        for case in kills.cases(given.kills, given.saves, given.seed):
            found = kills.run(case)
            print(f"{case.ranks} ranks {case.kill}: {found.wrong or 'ok'} ({found.seconds:.1f} s)")
            sys.stdout.flush()
            counts[f"{case.ranks} ranks, {case.kill.stage}"] += 1
            counts.update(text.split(maxsplit=1)[0].rstrip(":") for text in found.wrong)
    print(json.dumps(counts, indent=2, sort_keys=True))
    return any(counts[word] for word in ("wrong", "raw", "hang", "misblamed", "mixed"))


if __name__ == "__main__":
    sys.exit(main())
