"""Whoever watches a planning run sees its stages; nobody else pays for them."""

from __future__ import annotations

import pytest

from shardwright.planner import stages
from shardwright.planner.cli.console import STAGES, working
from tests.planner import mlps
from tests.planner.equal import features, planned


def test_every_stage_of_a_plan_is_seen() -> None:
    told: list[str] = []
    with stages.watch(told=told.append) as seen:
        planned(mlps.Mlp(), features(mlps.WIDTH), 2)
    order = ["read", "trace", "axes", "problem", "solve", "check", "emit", "verify"]
    assert list(seen.seconds) == order == list(dict.fromkeys(told)) == list(STAGES)
    assert min(seen.seconds.values()) >= 0
    assert seen.figures["variables"] > seen.figures["presolved_variables"] > 0


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_what_is_done(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with working("planning a-model"):
        stages.stage("solve")
    out, said = capsys.readouterr()
    assert out == ""
    assert (f"planning a-model: {STAGES['solve']}" in said) is terminal


def test_turns_of_a_stage_add_up() -> None:
    clock = iter([10.0, 11.0, 13.0, 17.0, 25.0])
    with stages.watch(lambda: next(clock)) as seen:
        for name in ("solve", "check", "solve", "check"):
            stages.stage(name)
    stages.stage("nobody watches now")
    assert seen.seconds == {"solve": 1.0 + 4.0, "check": 2.0 + 8.0}
