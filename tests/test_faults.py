"""A sample of the campaigns of `benchmarks/faults/`: nothing wrong, nothing raw, and all end.

The whole of them is run by hand; SECURITY.md has the figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from benchmarks.faults import checkpoints, commands, quantized
from benchmarks.faults.models import KINDS
from benchmarks.faults.outcomes import Tally, Wrong
from benchmarks.faults.plan_mutations import mutated
from benchmarks.faults.plans import Subject, mutants
from shardwright.errors import PlanError
from tests.marks import long

OF_EACH = 25


@pytest.mark.parametrize("kind", ["shared kv heads", long("fused qkv"), long("experts")])
def test_mutated_plans(kind: str) -> None:
    subject = Subject(KINDS[kind])
    others = [json.loads(p.to_json()) for p in subject.plans]
    tally = mutants(subject, Random(7), OF_EACH, others)
    assert tally.ok, tally.cases
    assert tally.counts["equal"] >= len(subject.plans) and tally.counts["refused"] > OF_EACH // 2


def test_mutated_checkpoints() -> None:
    for kind, tally in checkpoints.campaign(30, 7):
        assert tally.ok, (kind, tally.cases)


def test_mutated_quantized_checkpoints() -> None:
    for kind, tally in quantized.campaign(40, 7):
        assert tally.ok, (kind, tally.cases)
        assert tally.counts["refused"] > 5


@pytest.mark.parametrize("count", [10, long(20)])
def test_command_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int) -> None:
    monkeypatch.chdir(tmp_path)  # and back, from where the campaign went
    for kind, tally in commands.campaign(count, 7):
        assert tally.ok, (kind, tally.cases)


def test_each_outcome_is_told_from_the_others() -> None:
    """A campaign that counted nothing as wrong would pass whatever came."""
    tally = Tally()

    def raises(error: BaseException) -> None:
        raise error

    def runs_on() -> None:
        while True:
            pass

    tally.take("equal", 1, lambda: None)
    tally.take("refused", 1, lambda: raises(PlanError("one line")))
    tally.take("raw", 1, lambda: raises(PlanError("two\nlines")))
    tally.take("raw", 1, lambda: raises(KeyError("x")))
    tally.take("wrong", 1, lambda: raises(Wrong("off by 3")))
    tally.take("hang", 0.05, runs_on)
    assert tally.counts == {"equal": 1, "refused": 1, "raw": 2, "wrong": 1, "hang": 1}
    assert not tally.ok and len(tally.cases) == 4


def test_mutants_are_the_same_again_and_none_is_the_plan_itself() -> None:
    subject = {"mesh": {"tp": 2}, "modules": {"a": {"inputs": [], "outputs": []}}}
    subject |= {"sub_axes": {}, "workload": {"seq": 2}, "pins": {}, "model": {"parameters": {}}}
    found = [mutated(Random(n), subject, [subject]) for n in range(50)]
    assert found == [mutated(Random(n), subject, [subject]) for n in range(50)]
    assert all(data != subject for _, data in found)
