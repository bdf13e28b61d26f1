"""Equal input, equal bytes: whatever the run, the seed of Python's hashes, the solver's threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwright.planner.solvers.cpsat import minimise
from tests import planning, zoo


def plan() -> str:
    """A plan for experts."""
    return planning.proven(zoo.build("mixtral")[1], tp=2).to_json()


def test_plans_do_not_hang_on_the_seed_of_hashes_or_on_the_run() -> None:
    """Under each seed sets are walked in another order; this process has a random one."""
    code = "from tests.planner.test_determinism import plan; print(plan(), end='')"
    command = [sys.executable, "-c", code]
    path = os.pathsep.join(sys.path)
    runs = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1")
    ]
    here = {plan()}
    found = {run.communicate(timeout=300)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert here == found
    assert len(here) == 1


def test_plans_do_not_hang_on_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = zoo.build("mixtral", num_hidden_layers=1)
    found = set()
    for seed in (0, 1):
        monkeypatch.setattr(minimise, "SEED", seed)
        found.add(planning.proven(model, tp=2).to_json())
    assert len(found) == 1
