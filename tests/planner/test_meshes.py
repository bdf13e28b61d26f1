"""Hosts and links: what collectives over several hosts take, and which mesh is chosen."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import shardwright
from shardwright.errors import InfeasibleError, PlanError, UsageError
from shardwright.planner.contract.mesh import hosts_of
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.contract.transitions import BUCKET
from shardwright.planner.devices.device import device
from shardwright.planner.report.mesh_table import launch_line
from shardwright.planner.search import ladder, meshes, restrictions, solution, traced_model
from shardwright.planner.search.task import Task
from shardwright.planner.strategies import op_strategies
from tests import planning
from tests.planner.test_mixtures import Experts, Model, X
from tests.planning import as_text

H100 = device("h100-nvlink")
L4 = device("l4-pcie")
KINDS = ("all_reduce", "all_gather", "reduce_scatter")

CONFIG = transformers.LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=1, num_attention_heads=16,
    num_key_value_heads=8, vocab_size=32000, architectures=["LlamaForCausalLM"],
    dtype=torch.bfloat16,
)  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_hosts_of_a_group_by_enumeration(dims: list[tuple[int, bool]], per_host: int) -> None:
    sizes, chosen = zip(*dims, strict=True)
    groups: dict[tuple[int, ...], set[int]] = {}
    for rank, at in enumerate(product(*map(range, sizes))):
        fixed = tuple(i for i, c in zip(at, chosen, strict=True) if not c)
        groups.setdefault(fixed, set()).add(rank // per_host)
    assert hosts_of(sizes, chosen, per_host) == max(map(len, groups.values()))


def test_a_ring_over_two_hosts_by_hand() -> None:
    """8 devices of each host share the bytes on their way out: 8 x 50 GB/s."""
    sent = 2 * 15 * 4 * 10**8 // 16
    assert H100.ring("all_reduce", 4 * 10**8, 16, 2) == 20_000 + sent * 10**9 // (8 * 50 * 10**9)
    one_a_host = H100.collective("all_reduce", 10**8, 2, 2)
    assert one_a_host == 20_000 + 10**8 * 10**9 // (50 * 10**9)


def test_levels_by_hand() -> None:
    """Within a host 7/8 of the bytes twice, between two hosts half of an eighth twice."""
    size = 8 * 10**8
    within = 2 * (15_000 + 7 * 10**8 * 10**9 // (32 * 10**9))
    between = 50_000 + 10**8 * 10**9 // 1_562_500_000
    assert L4.by_levels("all_reduce", size, 16, 2) == within + between
    assert L4.collective("all_reduce", size, 16, 2) == within + between  # less than a ring
    assert L4.way("all_reduce", size, 16, 2) == "levels"
    assert (L4.way("all_reduce", size, 8), L4.way("all_reduce", size, 2, 2)) == ("", "ring")


def test_an_all_to_all_leaves_each_device_by_its_own_way_out() -> None:
    """Of 16 parts on two hosts, 8 are for the other host; a ring would send them through once."""
    out = 20_000 + 8 * 10**8 // 16 * 8 * 10**9 // (50 * 10**9)
    assert H100.collective("all_to_all", 8 * 10**8, 16, 2) == out
    assert H100.way("all_to_all", 8 * 10**8, 16, 2) == ""
    one_a_host = 20_000 + 4 * 10**8 * 10**9 // (50 * 10**9)
    assert H100.collective("all_to_all", 8 * 10**8, 2, 2) == one_a_host


def test_a_backend_that_only_makes_rings_goes_in_rings() -> None:
    """As gloo does."""
    assert L4.hosts is not None
    rings = L4.model_copy(update={"hosts": L4.hosts.model_copy(update={"levels": False})})
    given = "all_reduce", 8 * 10**8, 16, 2
    assert (L4.way(*given), rings.way(*given)) == ("levels", "ring")
    assert rings.collective(*given) == L4.ring(*given) > L4.collective(*given)


@pytest.mark.parametrize("kind", KINDS)
def test_several_hosts_are_never_faster_than_one(kind: str) -> None:
    for profile, size, hosts in product((H100, L4), (10**3, 10**6, 10**9), (2, 4)):
        one = profile.collective(kind, size, 16)
        several = profile.collective(kind, size, 16, hosts)
        assert several >= one


def planned(**how: Any) -> Plan:
    return shardwright.plan(CONFIG, **how)


def test_ranks_past_the_devices_of_a_host_are_on_others() -> None:
    one, two = planned(tp=16, gpus_per_host=16), planned(tp=16)
    assert (one.workload.gpus_per_host, two.workload.gpus_per_host) == (None, 8)
    assert one.predicted.time_ns < two.predicted.time_ns
    assert planned(tp=8).workload.gpus_per_host is None
    assert "gpus_per_host" not in one.to_json()
    assert shardwright.check(two, CONFIG).digest == two.digest


def test_what_crosses_hosts_is_counted_apart() -> None:
    """`tp` stays on a host, gradients are averaged between hosts."""
    plan = planned(mesh={"dp": 2, "tp": 2}, gpus_per_host=2, phase="train", batch=2)
    found = {(c.phase, c.hosts) for c in plan.predicted.collectives}
    assert {("forward", 1), ("backward", 1), ("backward", 2)} == found
    ways = {c.way for c in plan.predicted.collectives if c.hosts > 1}
    assert ways and ways <= {"ring", "levels"}
    for way in ways:
        how = "in a ring" if way == "ring" else "by levels"
        assert f"all-reduce over 2 hosts {how}" in as_text(plan)
    one = planned(mesh={"dp": 2, "tp": 2}, phase="train", batch=2)
    sums = [
        (
            sum(c.count for c in p.predicted.collectives),
            sum(c.bytes for c in p.predicted.collectives),
        )
        for p in (plan, one)
    ]
    assert sums[0] == sums[1] and not {"hosts", "way"} & {*one.to_json().split('"')}


def test_gradients_that_are_averaged_together_pay_one_latency(tmp_path: Path) -> None:
    """Who has which, a bucket, and what shares of full buckets their bytes are."""
    times, second = [], 10**9
    for latency in (0, second):
        profile = H100.model_dump(exclude_none=True)
        profile["links"]["all_reduce"]["latency_ns"] = latency
        (tmp_path / "device.json").write_text(json.dumps(profile))
        plan = planned(
            mesh={"dp": 2, "tp": 1}, phase="train", batch=2, device=str(tmp_path / "device.json")
        )
        times.append(plan.predicted.time_ns)
        drawn = sum(sum(i.phase_ns.values()) * b.count for b in plan.drawing for i in b.items)
        assert drawn == times[-1]
    sizes = [2 * p.numel() for p in meta(CONFIG).parameters()]
    shares = sum(min(size / BUCKET, 1) for size in sizes)
    assert len(sizes) > shares + 2
    assert times[1] - times[0] == pytest.approx((2 + shares) * second, abs=len(sizes))
    calls = [c for c in plan.predicted.collectives if c.phase == "backward"]
    alone = sum(size > BUCKET for size in sizes)
    assert [(c.kind, c.count) for c in calls] == [("all_reduce", 1 + alone + 1)]
    assert calls[0].bytes == sum(sizes) + 4 * len(sizes)


def meta(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


WORKLOADS: list[dict[str, Any]] = [
    {"phase": "prefill,decode:64", "batch": 8, "seq": 256},
    {"phase": "train", "batch": 4, "seq": 256},
    {"phase": "decode", "batch": 2, "seq": 512, "memory": 200_000_000},
    {"phase": "train", "batch": 2, "seq": 2048},
]


@pytest.mark.parametrize("how", WORKLOADS)
def test_the_chosen_mesh_is_the_best_of_all(how: dict[str, Any]) -> None:
    """Each mesh planned by itself has the same figures, and the best of them the same plan."""
    found = planned(cluster=shardwright.Cluster(2, 4), **how)
    alone = {}
    for tp in (1, 2, 4, 8):
        copies = min(8 // tp, how["batch"])
        cp = 8 // tp // copies
        mesh = {"dp": copies, "cp": cp, "tp": tp}
        mesh = {name: n for name, n in mesh.items() if n > 1 or name == "tp"}
        for dp in ("ddp", "fsdp") if copies > 1 and how["phase"] == "train" else ("ddp",):
            if cp == 1 or how["phase"] != "decode":
                given = {"mesh": mesh, "dp": dp, "gpus_per_host": 4, **how}
                alone[tuple(mesh.items()), dp] = _or_none(**given)
    assert {(tuple(c.mesh.items()), c.dp) for c in found.meshes} == alone.keys()
    for choice in found.meshes:
        plan = alone[tuple(choice.mesh.items()), choice.dp]
        assert choice.fits == (plan is not None)
        if plan is not None and plan.predicted.memory is not None:
            figures = plan.predicted.time_ns, plan.predicted.memory.total
            assert (choice.time_ns, choice.memory) == figures
    plans = [plan for plan in alone.values() if plan is not None]
    best = min(plans, key=lambda plan: plan.predicted.time_ns)
    assert found.meshes[0].mesh == found.mesh == best.mesh
    ours, theirs = ({**p.model_dump(), "digest": "", "meshes": []} for p in (found, best))
    assert ours == {**theirs, "meshes": []}
    assert shardwright.check(found, CONFIG).digest == found.digest


def test_sequences_are_shared_where_the_batch_has_too_few() -> None:
    def found(**how: Any) -> list[dict[str, int]]:
        plan = planned(cluster=shardwright.Cluster(2, 4), **how)
        return [choice.mesh for choice in plan.meshes]

    three = found(phase="prefill", batch=3, seq=64)  # 3 sequences for 4 or 8 copies
    assert sorted(map(repr, three)) == sorted(
        map(repr, [{"tp": 8}, {"dp": 2, "tp": 4}, {"dp": 2, "cp": 2, "tp": 2},
                   {"dp": 2, "cp": 4, "tp": 1}])
    )  # fmt: skip
    assert found(phase="prefill", batch=1, seq=5)[-1:] != [{"cp": 4, "tp": 2}]
    assert {"cp": 2, "tp": 4} in found(phase="prefill", batch=1, seq=5)
    assert found(phase="prefill,decode:8", batch=1) == [{"tp": 8}]


def test_a_model_whose_sequences_cannot_be_shared_has_other_meshes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = traced_model.TracedModel.on

    def refusing(model: Any, mesh: dict[str, int], *how: Any) -> Task:
        if "cp" in mesh:
            raise InfeasibleError("no sequences")
        return on(model, mesh, *how)

    monkeypatch.setattr(traced_model.TracedModel, "on", refusing)
    plan = planned(cluster=shardwright.Cluster(1, 2), phase="prefill", batch=1)
    assert [(c.mesh, c.why) for c in plan.meshes] == [
        ({"tp": 2}, ""),
        ({"cp": 2, "tp": 1}, "no sequences"),
    ]


def test_meshes_share_what_does_not_depend_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes and strategies are found once, and what cannot fit is not posed."""
    refined = Mock(wraps=traced_model.refine)
    posed = Mock(wraps=restrictions.build_network)
    monkeypatch.setattr(traced_model, "refine", refined)
    monkeypatch.setattr(restrictions, "build_network", posed)
    strategies = Mock(wraps=op_strategies._strategies)
    monkeypatch.setattr(op_strategies, "_strategies", strategies)
    l4 = {"device": "l4-pcie", "phase": "train", "optimizer_bytes": 400, "batch": 8, "seq": 8}
    found = planned(cluster=shardwright.Cluster(1, 8), recompute=False, **l4)
    over = [choice for choice in found.meshes if not choice.fits]
    assert over and all(choice.memory and choice.memory > L4.memory_bytes for choice in over)
    assert posed.call_count <= len(found.meshes) - len(over)
    assert refined.call_count == 1
    before = strategies.call_count
    planned(mesh={"tp": 8}, recompute=False, **l4)
    assert before < 2 * (strategies.call_count - before)


def test_only_the_best_plan_is_run_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits, several meshes are solved once more, for least memory; one is checked."""
    climbed, ran = Mock(wraps=ladder.climb), Mock(wraps=ladder.dry_run)
    checked = Mock(wraps=solution.check_unfolded)
    monkeypatch.setattr(solution, "check_unfolded", checked)
    monkeypatch.setattr(meshes, "climb", climbed)
    monkeypatch.setattr(ladder, "dry_run", ran)
    l4 = {"device": "l4-pcie", "phase": "train", "optimizer_bytes": 4000, "batch": 8, "seq": 8}
    found = planned(cluster=shardwright.Cluster(1, 8), **l4)
    settled = [call for call in climbed.mock_calls if ladder.SETTLING in call.args]
    assert not found.meshes[0].fits and len(settled) > 1
    assert ran.call_count == checked.call_count == 1


def test_if_the_best_plan_fails_on_meta_the_next_is_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how = {"cluster": shardwright.Cluster(2, 2), "phase": "decode", "batch": 4}
    first, second = planned(**how).meshes[:2]

    def fails(task: Task, *given: Any) -> Any:
        if dict(task.mesh) == first.mesh:
            return InfeasibleError("it fails on meta")
        return dry_run(task, *given)

    dry_run = ladder.dry_run
    monkeypatch.setattr(ladder, "dry_run", fails)
    found = planned(**how)
    assert found.mesh == found.meshes[0].mesh == second.mesh
    assert [c.why for c in found.meshes if c.mesh == first.mesh] == ["it fails on meta"]


def _or_none(**how: Any) -> Plan | None:
    try:
        return planned(**how)
    except shardwright.InfeasibleError:
        return None


def test_the_report_has_all_meshes_and_how_to_start() -> None:
    plan = planned(cluster=shardwright.Cluster(2, 2), phase="prefill,decode:8", batch=4)
    text = as_text(plan)
    for choice in plan.meshes:
        assert ",".join(f"{name}={size}" for name, size in choice.mesh.items()) in text
    assert "PREFILL_TOKENS/S" in text and "TOKENS/S/USER" in text and "x the time" in text
    assert launch_line(plan).startswith("torchrun --nproc-per-node 2 --nnodes 2 ")
    assert prod(plan.mesh.values()) == 4
    least = planned(cluster=shardwright.Cluster(1, 2), batch=2, objective="memory")
    assert least.mesh == {"tp": 2} and "times the bytes" in as_text(least)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"cluster": shardwright.Cluster(2, 4), "tp": 2}, "not both"),
        ({"cluster": shardwright.Cluster(2, 4), "device": "cpu-gloo"}, "no links between hosts"),
        ({"tp": 4, "gpus_per_host": 2, "device": "cpu-gloo"}, "no links between hosts"),
        ({"tp": 4, "gpus_per_host": 0}, "gpus_per_host"),
        ({"cluster": shardwright.Cluster(1, 2), "batch": 0}, "batch must be from 1"),
        ({"tp": 2, "batch": 0}, "batch must be from 1"),
    ],
)
def test_what_makes_no_sense_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(**how)


def test_a_file_whose_meshes_are_not_its_own_is_refused() -> None:
    plan = planned(cluster=shardwright.Cluster(1, 2), batch=2)
    for edit, message in (
        (lambda rows: rows.reverse(), "meshes.0: it is"),
        (lambda rows: rows[1]["mesh"].update(tp=8), "meshes.1: not of 2 ranks"),
    ):
        data = json.loads(plan.to_json())
        edit(data["meshes"])
        with pytest.raises(PlanError, match=message):
            Plan.from_json(json.dumps(data))


def test_a_cluster_has_gpus() -> None:
    for hosts, gpus in ((0, 8), (2, 0), (1 << 20, 8)):
        with pytest.raises(UsageError, match="GPUs"):
            shardwright.Cluster(hosts, gpus)


def test_copies_of_an_expert_are_on_fewer_hosts() -> None:
    """Its gradient is averaged over dp alone, that of the router over all four hosts."""
    plan = planning.plan(
        Model(Experts), mesh={"dp": 2, "ep": 2, "tp": 1}, args=(X,), phase="train", batch=4,
        gpus_per_host=1, device="h100-nvlink",
    )  # fmt: skip
    sums = [c for c in plan.predicted.collectives if c.kind == "all_reduce"]
    assert {(c.phase, c.hosts) for c in sums} == {("backward", 2), ("backward", 4)}
