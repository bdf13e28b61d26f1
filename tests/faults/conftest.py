"""A tiny model with weights and its plans, made once for the folder, and ranks that are forked."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.models import checkpoint
from benchmarks.forked import Ended, run_forked
from tests.planning import plan

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and children inherit that

Start = Callable[..., list[Ended]]

if sys.platform != "linux":
    collect_ignore_glob = ["test_*"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, `other` (other weights), and plans: 1, 2, 4 ranks, another for 2, and 2 x 2."""
    out = tmp_path_factory.mktemp("faults")
    model, _ = checkpoint(out / "model"), checkpoint(out / "other", seed=1)
    for ranks in (1, 2, 4):
        plan(model, tp=ranks).save(out / f"plan-{ranks}.json")
    plan(model, tp=2, phase="train").save(out / "plan-train.json")
    plan(model, mesh={"dp": 2, "tp": 2}).save(out / "plan-mesh.json")
    return out


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """`start(ranks, fn, *args)`: how each rank ended."""

    def run(
        ranks: int, fn: Callable[..., None], *args: Any, environ: Sequence[dict[str, str]] = ()
    ) -> list[Ended]:
        return run_forked(ranks, fn, args, tmp_path, environ=environ)

    return run


def all_well(ends: Sequence[Ended]) -> None:
    """Each rank did what it should; else what each wrote is shown whole: where one hung, too."""
    said = "\n".join(f"rank {n}, {end.how}: {end.text}\n{end.log}" for n, end in enumerate(ends))
    assert {end.how for end in ends} == {"well"}, said


def errors(ends: Sequence[Ended]) -> list[str]:
    """What each rank raised, none of it raw; those that died apart."""
    left = [end for end in ends if end.how != "killed"]
    assert {end.how for end in left} == {"error"}, left
    assert not any("Traceback" in end.log or "\n" in end.text for end in left), left
    return [end.text for end in left]
