"""`calibrate`: fitting, and a small real run on two gloo ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.demo_launch import torchrun
from shardwright.planner.devices.calibrate import fit
from shardwright.planner.devices.device import device
from tests.cli.conftest import Run


def test_fit_finds_a_line() -> None:
    latency, slope = fit([(n, 5000 + 3 * n) for n in (1000, 10_000, 100_000, 10**7)])
    assert latency == pytest.approx(5000)
    assert slope == pytest.approx(3)


def test_fit_weighs_small_and_large_alike() -> None:
    """A large time that is off by a half must not spoil the latency."""
    points = [(n, 5000 + 3 * n) for n in (10, 100, 1000, 10_000)]
    latency, _ = fit([*points, (10**8, 450_000_000)])
    assert latency == pytest.approx(5000, rel=0.2)


def test_fit_has_no_negative_latency_or_speed() -> None:
    latency, slope = fit([(1000, 10), (2000, 5000), (3000, 10_000)])
    assert latency == 0 and slope > 0
    latency, slope = fit([(1000, 900), (2000, 800), (3000, 700)])
    assert slope == 0 and 700 < latency < 900


def test_without_torchrun_it_says_how(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = run("calibrate", "-o", tmp_path / "profile.json")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "torchrun --nproc-per-node 2 -m shardwright calibrate -o profile.json" in result.stderr
    assert not (tmp_path / "profile.json").exists()


def test_two_ranks_write_a_profile_that_plan_takes(run: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    torchrun("shardwright", ["calibrate", "--quick", "-o", path])
    profile = device(str(path))
    assert profile.source.startswith("measured by `shardwright calibrate` on 2 ranks: ")
    assert profile.source.endswith("; gloo")
    assert 10**7 < profile.memory_bytes_per_s < 10**13
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert 0 < profile.collective(kind, 2**18, 2) < 10**10
    result = run("plan", model, "--tp", 2, "--device", path, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["workload"]["device"] == str(path)
