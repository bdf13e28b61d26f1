"""The demo ends with an error when something differs; its success is what `make demo` shows."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import demo
from benchmarks.demo_launch import RanksFailed, torchrun

PLAN = SimpleNamespace(
    solver=SimpleNamespace(name="some", status="optimal"),
    predicted=SimpleNamespace(
        unsharded_bytes=100,
        parameter_bytes=[50],
        collectives=[SimpleNamespace(phase="forward", kind="all_reduce", count=2)],
    ),
)
RANK = {"rank": 0, "held": 50, "read": 50, "forward": {"kinds": {"all_reduce": 2}, "bytes": 8}}


@pytest.mark.parametrize(("difference", "code"), [(1e-6, 0), (1e-3, 1), (math.nan, 1)])
def test_exit_code(difference, code, monkeypatch, capsys):
    def run_model(key: str, directory: Path) -> demo.Outcome:
        checks = [demo.Check("logits", difference, 1e-4), *demo.as_planned(PLAN, [RANK])]
        return demo.Outcome(PLAN, 1.0, 1, 10, [RANK], checks, "")

    monkeypatch.setattr(demo, "run_model", run_model)
    monkeypatch.setattr(demo, "draw", lambda outcomes, path: None)
    monkeypatch.setattr(sys, "argv", ["demo"])
    assert demo.main() == code
    text = capsys.readouterr().out
    assert ("All 9 checks passed" if code == 0 else "3 of 9 checks failed") in text


def test_what_the_plan_did_not_foresee():
    more = {**RANK, "held": 53, "forward": {"kinds": {"all_gather": 1, "all_reduce": 1}}}
    assert [c.difference for c in demo.as_planned(PLAN, [more])] == [3, 2]


def test_a_rank_that_fails():
    """Ranks of a module that imports little, under the real torchrun."""
    with pytest.raises(RanksFailed, match="No such file"):
        torchrun("json.tool", ["nowhere.json"], timeout=60)
