"""Several mesh dims: copies of a split model share the batch, and their gradients are averaged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright
from benchmarks.ranks_case import llama
from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.mesh import parse_mesh
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.audit import count_collectives
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.planner.mlps import WIDTH, Mlp
from tests.predicted import Tally, counted, held, predicted
from tests.ranks import run_ranks

IDS = torch.randint(0, 131, (4, 11), generator=torch.Generator().manual_seed(2))


def gradients(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Of a mean loss over `ids`, in float64 (that of transformers computes in float32)."""
    logits = model(ids, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def numbers(tally: Tally) -> dict[str, int]:
    """How many collectives of each kind."""
    return {kind: count for kind, (count, _) in tally.items()}


@pytest.mark.parametrize(
    ("mesh", "keys"),
    [
        ({"dp": 2, "tp": 2}, 4),
        ({"dp": 2, "tp": 4}, 2),
        ({"tp": 2, "dp": 2}, 4),
        ({"dp": 4, "tp": 1}, 4),
    ],
)
def test_gradients_are_those_of_the_whole_batch(mesh: dict[str, int], keys: int) -> None:
    """Twice in a row, since they accumulate; logits are those of a copy's own sequences."""
    model = llama(8, keys, layers=1)
    plan = planning.plan(model, mesh=mesh, phase="train", batch=4, seq=11)
    assert (plan.mesh, plan.batch_dims, plan.workload.replicas) == (mesh, ["dp"], mesh["dp"])
    logits = model(IDS).logits.detach()
    gradients(model, IDS)
    want = {n: g.clone() for n, g in gradients(model, IDS).items() if g is not None}
    model.zero_grad()

    def work(at: Mesh) -> tuple[int, Tally, Tally]:
        local = shardwright.apply(copy.deepcopy(model), plan, at)
        mine = IDS.chunk(mesh["dp"])[at["dp"].rank]
        whole = logits.chunk(mesh["dp"])[at["dp"].rank]
        torch.testing.assert_close(local(mine).logits, whole, rtol=0, atol=1e-9)
        gradients(local, mine)
        found = full_tensors(local, gradients(local, mine))
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
        with count_collectives() as ahead:
            out = local(mine)
        with count_collectives() as back:
            out.logits.square().sum().backward()
        return held(local), counted(ahead), counted(back)

    found = run_ranks(mesh["dp"] * mesh["tp"], work, plan.mesh)  # ranks are counted in its order
    assert [size for size, *_ in found] == plan.predicted.parameter_bytes
    wanted = predicted(plan, "forward"), predicted(plan, "backward")
    assert tuple(found[0][1:]) == wanted  # it holds most of 131 rows, and sends most
    for _, *seen in found:
        assert [numbers(each) for each in seen] == [numbers(each) for each in wanted]


def test_the_batch_is_shared_and_its_gradients_priced() -> None:
    """A copy runs its share of the batch, and averages the gradient of each parameter."""
    model, pins = llama(8, 2, layers=1), {"lm_head.weight": "shard:0"}
    alone = planning.plan(model, 4, batch=2, phase="train", pins=pins)
    shared = planning.plan(model, mesh={"dp": 2, "tp": 4}, batch=4, phase="train", pins=pins)
    assert shared.modules == alone.modules
    assert shared.predicted.time_ns > alone.predicted.time_ns
    assert shared.predicted.parameter_bytes == alone.predicted.parameter_bytes * 2
    more = [
        [(c.count, c.bytes) for c in plan.predicted.collectives if c.phase == phase]
        for plan in (alone, shared)
        for phase in ("forward", "backward")
    ]
    assert more[0] == more[2]
    averaged = [b[0] - a[0] for a, b in zip(more[1], more[3], strict=True)]
    assert sum(averaged) == 2  # all gradients, and who has which


def test_copies_that_share_out_a_model_hold_what_is_priced() -> None:
    """Parameters and gradients in FSDP2, of odd sizes too; what is sent for them is no less."""
    model, sizes = llama(8, 4), {"dp": 2, "tp": 2}
    plan = planning.plan(model, mesh=sizes, dp="fsdp", phase="train", batch=4, seq=11)
    gradients(model, IDS)

    def work(at: Mesh) -> tuple[int, int]:
        local: Any = shardwright.apply(copy.deepcopy(model), plan, at)
        shardwright.fully_shard(local, plan)
        local.zero_grad()
        gradients(local, IDS.chunk(2)[at["dp"].rank])
        whole = full_tensors(local, {n: p.grad for n, p in local.named_parameters()})
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(whole[name], parameter.grad, rtol=1e-9, atol=1e-9)
        return held(local), sum(p.grad.to_local().nbytes for p in local.parameters())

    found, predicted = run_ranks(4, work, sizes), plan.predicted
    assert predicted.memory is not None
    most = (predicted.memory.parameters, predicted.memory.gradients)
    assert (max(a for a, _ in found), max(b for _, b in found)) == most
    assert most[0] < 0.51 * max(predicted.parameter_bytes)
    calls = {(c.phase, c.kind): c for c in predicted.collectives}
    whole = sum(p.nbytes for n, p in model.named_parameters() if not plan.is_shared(n))
    assert 0 < whole < 0.05 * most[1]  # norms are not worth a collective
    assert calls["backward", "reduce_scatter"].bytes >= 2 * (most[1] - whole)
    assert calls["forward", "all_gather"].bytes >= most[1] - whole
    assert Plan.from_json(plan.to_json()).fsdp == plan.fsdp


def test_tp_is_short_for_a_mesh_of_one_dim() -> None:
    model, args = Mlp(), (torch.randn(3, 19, WIDTH),)
    assert planning.plan(model, 2, args=args) == planning.plan(model, mesh={"tp": 2}, args=args)


def test_a_mesh_that_cannot_be_meant() -> None:
    assert parse_mesh("dp=2, tp=4") == {"dp": 2, "tp": 4}
    for text, why in [
        ("dp=2", "no dim 'tp'"),
        ("tp", "write names and ranks"),
        ("tp=2,tp=4", "named twice"),
        ("tp=0", "at least 1"),
        ("tp=2,d.p=2", "no name for a mesh dim"),
        ("pp=2,tp=2,ep=2", "mesh dim 'pp' means nothing here: 'tp' splits weights, 'cp' seq"),
    ]:
        with pytest.raises(UsageError, match=why):
            parse_mesh(text)
    model, args = Mlp(), (torch.randn(3, 19, WIDTH),)
    with pytest.raises(UsageError, match="either tp"):
        planning.plan(model, 2, mesh={"tp": 2}, args=args)
    text: Any = "dp=2,tp=2"
    with pytest.raises(UsageError, match="mesh 'dp=2,tp=2' is no mapping"):
        planning.plan(model, mesh=text, args=args)
    with pytest.raises(UsageError, match="cannot be shared by 4 copies"):
        planning.plan(model, mesh={"dp": 4, "tp": 2}, batch=2, args=args)
    with pytest.raises(UsageError, match="'fsdp' on a mesh with copies of the model"):
        planning.plan(model, mesh={"tp": 2}, dp="fsdp", args=args)
    plan = planning.plan(model, mesh={"dp": 2, "tp": 2}, args=args)
    with pytest.raises(PlanError, match="2 ranks on mesh dim 'dp', the mesh has 0"):
        shardwright.apply(model, plan, Mesh.shape_only({"tp": (0, 2)}))
