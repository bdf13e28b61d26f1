"""`calibrate`: fitting, and a small real run on two gloo ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.demo_launch import free_port, torchrun
from shardwright.errors import UsageError
from shardwright.planner.devices.calibrate import groups_by_level
from shardwright.planner.devices.device import Device, Hosts, Link, device
from shardwright.planner.devices.fit import fit
from shardwright.planner.devices.nccl_tests import read, with_links
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


def printed(kind: str, hosts: int, near: int, made: Device, named: bool = True) -> str:
    """What nccl-tests prints where collectives take as long as the profile `made` says."""
    ranks = hosts * near
    lines = [f"# Collective test starting: {kind}_perf"] if named else []
    lines += [
        "# nThread 1 nGpus 8 minBytes 8 maxBytes 1073741824 step: 4(factor)",
        "# Using devices",
    ]
    lines += [
        f"#  Rank {i:2} Group  0 Pid   1{i} on   worker-{i // near} device  {i % near} [0x8d] H100"
        for i in range(ranks)
    ]
    lines.append(
        "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    )
    for power in range(12, 31, 2):
        size = 2**power
        own = size // ranks if kind == "all_gather" else size
        us = made.collective({"alltoall": "all_to_all"}.get(kind, kind), own, ranks, hosts) / 1000
        lines.append(
            f"{size:12} {size // 4:12} float sum -1 {us:9.2f} 1.0 2.0 0 {us / 2:9.2f} 1.0 2.0 N/A"
        )
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 80.5"])


@pytest.mark.parametrize("name", ["h100-nvlink", "mi300x-infinity-fabric"])
def test_links_from_nccl_tests(run: Run, tmp_path: Path, name: str) -> None:
    """What the tests would print of a made-up machine gives its links back."""
    base = device(name)
    link = {
        kind: Link(latency_ns=1000 * (5 + i), bytes_per_s=10**10 * (3 + i))
        for i, kind in enumerate(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
    }
    out = Hosts(devices=8, latency_ns=31_000, bytes_per_s=2 * 10**9)
    made = base.model_copy(
        update={"links": base.links.model_copy(update=link), "hosts": out.model_copy()}
    )
    given = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "alltoall"):
        (path := tmp_path / f"{kind}.txt").write_text(printed(kind, 1, 8, made, kind != "alltoall"))
        given += ["--nccl-tests", path]
    rings = made.model_copy(update={"hosts": out.model_copy(update={"levels": False})})
    (path := tmp_path / "two hosts.txt").write_text(printed("all_reduce", 2, 8, rings))
    profile = tmp_path / "profile.json"
    found = run("calibrate", *given, "--nccl-tests", path, "--device", name, "-o", profile)
    assert found.exit_code == 0, found.stderr
    got = device(str(profile))
    assert "all_to_all on 8 ranks of 1 hosts" in got.source and base.source in got.source
    assert got.hosts is not None
    for kind, want in [*link.items(), ("", out)]:
        have = getattr(got.links, kind) if kind else got.hosts
        assert have.latency_ns == pytest.approx(want.latency_ns, rel=0.05)
        assert have.bytes_per_s == pytest.approx(want.bytes_per_s, rel=0.05)
    assert (
        got.model_copy(update={"links": base.links, "hosts": base.hosts, "source": base.source})
        == base
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nothing", "no list of two ranks"),
        ("named", "does not say which collective"),
        ("row", "has no two sizes"),
    ],
)
def test_what_nccl_tests_did_not_print(run: Run, tmp_path: Path, text: str, why: str) -> None:
    whole = printed("all_reduce", 1, 2, device("h100-nvlink"), named=text == "row")
    cut = {"nothing": "", "named": whole, "row": whole[: whole.index("float")]}[text]
    (path := tmp_path / "run.txt").write_text(cut)
    profile = tmp_path / "profile.json"
    found = run("calibrate", "--nccl-tests", path, "--device", "h100-nvlink", "-o", profile)
    assert found.exit_code == 2 and why in found.stderr and found.stderr.count("\n") == 1
    assert not profile.exists()


def test_all_to_alls_between_hosts_are_no_link(tmp_path: Path) -> None:
    base = device("h100-nvlink")
    (path := tmp_path / "run.txt").write_text(printed("alltoall", 2, 8, base))
    with pytest.raises(UsageError, match="give all_reduce_perf"):
        with_links(base, [read(path)])


def test_nccl_tests_need_a_profile_for_all_else(run: Run, tmp_path: Path) -> None:
    found = run("calibrate", "--device", "h100-nvlink", "-o", tmp_path / "profile.json")
    assert found.exit_code == 2 and "go together" in found.stderr
