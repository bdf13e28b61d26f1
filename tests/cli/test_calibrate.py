"""`calibrate`: fitting, and a small real run on two gloo ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.demo_launch import free_port, torchrun
from shardwright.errors import UsageError
from shardwright.planner.devices.calibrate import fit, groups_by_level
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


def test_where_times_do_not_grow_a_byte_takes_no_more_than_all_of_it() -> None:
    latency, slope = fit([(1000, 900), (2000, 800), (3000, 700)])
    assert slope == pytest.approx(0.3) and 700 < latency < 900


def test_groups_within_and_between_hosts() -> None:
    assert groups_by_level(6, 3) == ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]])
    assert groups_by_level(2, 2) == ([[0, 1]], [[0], [1]])
    with pytest.raises(UsageError, match="start equally many on all"):
        groups_by_level(5, 3)


def test_without_torchrun_it_says_how(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = run("calibrate", "-o", tmp_path / "profile.json")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "torchrun --nproc-per-node 2 -m shardwright calibrate -o profile.json" in result.stderr
    assert not (tmp_path / "profile.json").exists()


def test_two_ranks_write_a_profile_that_plan_takes(run: Run, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    torchrun("shardwright", ["calibrate", "--quick", "-o", path])
    profile = device(str(path))
    assert profile.source.startswith("measured by `shardwright calibrate` on 2 ranks: ")
    assert profile.source.endswith("; gloo")
    assert 10**7 < profile.memory_bytes_per_s < 10**13
    assert profile.links.all_to_all is not None
    assert 0 <= profile.host_wait_ns < 10**7
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert 0 < profile.collective(kind, 2**18, 2) < 10**10
    result = run("plan", small, "--tp", 2, "--device", path, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["workload"]["device"] == str(path)


def test_two_hosts_have_links_within_and_between(run: Run, small: Path, tmp_path: Path) -> None:
    """Two agents of torchrun, with two ranks each, are two hosts."""
    path, port = tmp_path / "profile.json", str(free_port())

    def host(number: int) -> None:
        options = ("--nnodes", "2", "--node-rank", str(number), "--master-port", port)
        torchrun("shardwright", ["calibrate", "--quick", "-o", path], options=options)

    with ThreadPoolExecutor(2) as hosts:
        list(hosts.map(host, range(2)))
    found = device(str(path)).hosts
    assert found is not None and found.devices == 2 and not found.levels
    assert 0 < found.bytes_per_s < 10**12
    result = run("plan", small, "--hosts", 2, "--device", path, "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert {frozenset(row["mesh"].values()) for row in plan["meshes"]} == {
        frozenset({4}),
        frozenset({2}),
        frozenset({4, 1}),
    }
