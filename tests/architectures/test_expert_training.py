"""Experts spread over ranks: training, greedy tokens and checkpoints, as in one process."""

from __future__ import annotations

import copy
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import shardwright
from benchmarks.zoo_case import build, experts_of
from examples import train_3d
from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.audit import count_collectives, counts
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.marks import long
from tests.predicted import predicted
from tests.ranks import run_ranks

ROWS, TOKENS = 4, 12
MESHES = ({"dp": 2, "ep": 2, "tp": 1}, {"ep": 2, "tp": 2})


def planned(mesh: dict[str, int], phase: str = "train") -> tuple[Any, Plan]:
    """A mixture in float64, and its plan."""
    return mixture(), plan_on(tuple(mesh.items()), phase)


def mixture() -> Any:
    return build("causal", "qwen3_moe", torch.float64, num_hidden_layers=1)[1]


@cache
def plan_on(mesh: tuple[tuple[str, int], ...], phase: str) -> Plan:
    rows = 6 if ("ep", 3) in mesh else ROWS
    return planning.plan(mixture(), mesh=dict(mesh), batch=rows, phase=phase)


def own(rows: torch.Tensor, at: Mesh) -> torch.Tensor:
    """The sequences of this rank."""
    copies = [group for name, group in at.groups.items() if name in ("dp", "ep")]
    for group in copies:
        rows = rows.chunk(group.size)[group.rank]
    return rows


def penalty(model: Any) -> Any:
    """Of weights, outside of the model's calls."""
    experts = (p for n, p in model.named_parameters() if ".experts." in n)
    return sum(getattr(p, "full_tensor", lambda p=p: p)().square().sum() for p in experts)


def trained(model: Any, optimizer: Any, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """One step after a backward pass for each of `parts`: their losses, and the gradients' norm."""
    losses = []
    for ids in parts:
        losses.append(model(ids, labels=ids).loss + 1e-2 * penalty(model))
        losses[-1].backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return [torch.stack(losses).detach(), getattr(norm, "full_tensor", lambda: norm)()]


def each_and_more(few: int, many: int) -> list[Any]:
    """On each mesh, and much longer in `make long`."""
    return [case for mesh in MESHES for case in ((mesh, few), long(mesh, many))]


@pytest.mark.parametrize(("mesh", "number"), each_and_more(3, 10))
def test_steps_are_those_of_one_process(
    mesh: dict[str, int], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, and all parameters; gradients add up over two backward passes."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the loss, and the router
    model, plan = planned(mesh)
    draw = torch.Generator().manual_seed(0)
    steps = [[*torch.randint(3, 90, (2, ROWS, TOKENS), generator=draw)] for _ in range(number)]
    whole = copy.deepcopy(model).train()
    optimizer = train_3d.optimizer_of(whole)
    want = [trained(whole, optimizer, parts) for parts in steps]
    before, after = dict(model.named_parameters()), dict(whole.named_parameters())
    router = "model.layers.0.mlp.gate.weight"
    assert float((after[router] - before[router]).detach().abs().max()) > 1e-3

    def work(at: Mesh) -> list[list[torch.Tensor]]:
        local = shardwright.apply(copy.deepcopy(model), plan, at).train()
        optimizer = train_3d.optimizer_of(local)
        made = [trained(local, optimizer, [own(ids, at) for ids in parts]) for parts in steps]
        for name, found in full_tensors(local, dict(local.named_parameters())).items():
            torch.testing.assert_close(found, after[name].detach(), rtol=0, atol=1e-9)
        return made

    every = run_ranks(prod(mesh.values()), work, mesh)
    for step, (losses, norm) in enumerate(want):
        mean = torch.stack([made[step][0] for made in every]).mean(0)
        torch.testing.assert_close(mean, losses, rtol=0, atol=1e-9)
        for made in every:
            torch.testing.assert_close(made[step][1], norm, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mesh", MESHES)
def test_all_reduces_are_as_predicted(mesh: dict[str, int]) -> None:
    """All copies average what they all have at once, and the copies of an expert its gradients."""
    model, plan = planned(mesh)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)

    def work(at: Mesh) -> int:
        local: Any = shardwright.apply(copy.deepcopy(model), plan, at).train()
        loss = local(own(ids, at), labels=own(ids, at)).loss
        with count_collectives() as calls:
            loss.backward()
        return counts(calls)["all_reduce"]

    assert run_ranks(4, work, mesh) == [predicted(plan, "backward")["all_reduce"][0]] * 4


@pytest.mark.parametrize(("mesh", "more"), [long(MESHES[0], 16), *each_and_more(16, 64)[1:]])
def test_greedy_tokens_are_those_of_the_unsplit_model(mesh: dict[str, int], more: int) -> None:
    """With a KV cache."""
    model, plan = planned(mesh, "prefill")
    ids = torch.randint(3, 90, (ROWS, TOKENS), generator=torch.Generator().manual_seed(5))
    how: Any = {"max_new_tokens": more, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = model.generate(ids, **how)
    assert want.shape == (ROWS, TOKENS + more) and len(want[:, TOKENS:].unique()) > 4

    def work(at: Mesh) -> None:
        local: Any = shardwright.apply(copy.deepcopy(model), plan, at)
        assert torch.equal(local.generate(own(ids, at), **how), own(want, at))

    run_ranks(prod(mesh.values()), work, mesh)


def test_what_would_leave_gradients_unequal_is_refused() -> None:
    """FSDP2 around copies that also average over ep: it averages over its own ranks alone."""
    model, plan = planned(MESHES[0])

    def work(at: Mesh) -> None:
        assert at.device_mesh is not None
        local = shardwright.apply(copy.deepcopy(model), plan, at)
        with pytest.raises(UsageError, match="averages gradients over dp, ep: leave out"):
            fully_shard(local, mesh=at.device_mesh["dp"])

    run_ranks(4, work, MESHES[0])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Checkpoints after two steps on ep 2 x tp 2, and the whole parameters and optimizer state."""
    model, plan = planned(MESHES[1])
    folder = tmp_path_factory.mktemp("written")
    draw = torch.Generator().manual_seed(1)
    steps = [[ids] for ids in torch.randint(3, 90, (2, ROWS, TOKENS), generator=draw)]

    def save(at: Mesh) -> Any:
        local = shardwright.apply(copy.deepcopy(model), plan, at).train()
        optimizer = train_3d.optimizer_of(local)
        for parts in steps:
            trained(local, optimizer, [own(ids, at) for ids in parts])
        weights, kept = get_state_dict(local, optimizer)
        dcp.save({"model": weights, "optimizer": kept}, checkpoint_id=folder / "state")
        shardwright.save(local, folder / "saved")
        whole = full_tensors(local, dict(local.named_parameters()))
        return whole, shardwright.full_optimizer_state(optimizer)

    return folder, *run_ranks(4, save, MESHES[1])[0]


# Of 4 experts, three ranks have 2, 1 and 1, where torch would have 2, 2 and 0.
@pytest.mark.parametrize("mesh", [{"ep": 3, "tp": 1}, {"dp": 2, "ep": 2, "tp": 1}, {"tp": 2}])
def test_checkpoints_are_read_on_other_meshes(
    written: tuple[Path, Any, Any], mesh: dict[str, int]
) -> None:
    """Torch's, ours, and the full state of an optimizer."""
    folder, want, state = written
    model, plan = planned(mesh)

    def load(at: Mesh) -> None:
        local: Any = shardwright.load(
            folder / "saved", plan, mesh=at.device_mesh, **experts_of(model)
        )
        check(local, None)
        split: Any = shardwright.apply(copy.deepcopy(model), plan, at)
        optimizer = train_3d.optimizer_of(split)
        weights, kept = get_state_dict(split, optimizer)
        dcp.load({"model": weights, "optimizer": kept}, checkpoint_id=folder / "state")
        set_state_dict(split, optimizer, model_state_dict=weights, optim_state_dict=kept)
        check(split, optimizer)
        other = train_3d.optimizer_of(split)
        shardwright.load_full_optimizer_state(other, state)
        check(split, other)

    def check(split: Any, optimizer: Any) -> None:
        found = full_tensors(split, dict(split.named_parameters()))
        assert all(torch.equal(found[name], value) for name, value in want.items())
        if optimizer is not None:
            kept = shardwright.full_optimizer_state(optimizer)["state"]
            assert kept.keys() == state["state"].keys() and len(kept) == len(want)
            for at, values in state["state"].items():
                assert all(torch.equal(kept[at][name], value) for name, value in values.items())

    run_ranks(prod(mesh.values()), load, mesh)
