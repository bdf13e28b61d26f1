"""Plans that split sequences over cp: equal to the whole model, what they promise, and refuse."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import shardwright
from benchmarks.compare import compare, predicted, reference
from benchmarks.ranks_case import kept_bytes
from benchmarks.zoo_case import build
from examples import train_3d
from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.dims import shard_range
from shardwright.planner.contract.mesh import CP
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.logits.split_logits import SealedLogitsError
from shardwright.runtime.state.gather import full_tensors
from tests import planning, zoo
from tests.ranks import run_ranks

BATCH, SEQ = 2, 19
MESH = {"cp": 2, "tp": 2}


@cache
def planned(name: str, tp: int) -> tuple[nn.Module, Plan]:
    """A model in float64, and its plan; priced for sequences that are worth sharing."""
    _, model = build("causal", name, torch.float64)
    mesh = {"cp": 2, "tp": tp}
    return model, planning.plan(model, mesh=mesh, batch=BATCH, seq=4096, phase="train")


def inputs(model: nn.Module, name: str, seq: int = SEQ) -> dict[str, Any]:
    return zoo.inputs(name, model.config, batch=BATCH, seq=seq)


@pytest.fixture
def all_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that compute in float32 would round each rank's part of a sum over the sequence."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.usefixtures("all_double")
@pytest.mark.parametrize(
    ("name", "tp", "attends"),
    # One weight for queries, keys and values; a window; attention that is no call of torch's.
    [("llama", 2, True), ("gpt2", 2, True), ("phi3", 1, True), ("gemma2", 1, False)]
    + [("qwen3_moe", 1, True)],
)
def test_equals_the_whole_model(name: str, tp: int, attends: bool) -> None:
    """Logits, with padding too, and gradients; collectives as predicted; attention in parts."""
    model, plan = planned(name, tp)
    given = inputs(model, name)
    expected = replace(reference(model, given), decode=None)
    work = partial(compare, model, given, plan, expected=expected)
    for found in run_ranks(2 * tp, work, {"cp": 2, "tp": tp}):
        assert found.logits <= 1e-9
        assert found.padded is not None and found.padded <= 1e-9
        assert found.gradients is not None and found.gradients <= 1e-9, found.worst
        assert {"forward": found.forward, "backward": found.backward} == predicted(plan)
    changed = {c.slot: c for spec in plan.modules.values() for c in spec.attention}
    assert "@cp" in changed["query"].target if attends else not changed


def test_fewer_bytes_are_kept_for_the_backward_pass() -> None:
    """Nearly half of what one rank keeps, logits aside."""
    model, plan = planned("phi3", 1)
    given = inputs(model, "phi3", 64)
    kept = run_ranks(2, partial(kept_bytes, model, plan, given), {"cp": 2, "tp": 1})
    assert max(kept) < 0.6 * kept_bytes(model, None, given)


def on_ranks(work: Callable[[nn.Module], Any]) -> list[Any]:
    """What `work` gives on each rank for a split llama."""
    model, plan = planned("llama", 2)
    return run_ranks(4, lambda mesh: work(apply(copy.deepcopy(model), plan, mesh)), MESH)


@pytest.mark.usefixtures("all_double")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_is_that_of_all_positions(checkpointing: bool) -> None:
    """Labels across the borders, most of those that count on one rank, blocks that run again."""
    model, _ = planned("llama", 2)
    given = inputs(model, "llama")
    labels = given["input_ids"].clone()
    labels[:, : SEQ // 2] = -100
    labels[0, 1] = 3
    name = "model.layers.0.self_attn.k_proj.weight"

    def loss(of: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        of.train().zero_grad()
        if checkpointing:
            of.gradient_checkpointing_enable()  # type: ignore[operator]
        found = of(**given, labels=labels).loss
        found.backward()
        grad = dict(of.named_parameters())[name].grad
        assert grad is not None
        return found.detach(), full_tensors(of, {name: grad})[name] if of is not whole else grad

    whole = copy.deepcopy(model)
    want = loss(whole)
    for got in on_ranks(loss):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("all_double")
def test_copies_in_fsdp2_train_as_the_whole_model() -> None:
    """Ten steps on 2 x 2 x 2 ranks: losses, norms of the whole batch's gradients, parameters."""
    model, plan = planned("llama", 2)
    steps = [torch.randint(3, 90, (4, SEQ), generator=torch.manual_seed(i)) for i in range(10)]
    whole = copy.deepcopy(model)
    optimizer = train_3d.optimizer_of(whole)
    want = [train_3d.one_step(whole, optimizer, ids) for ids in steps]
    after = dict(whole.named_parameters())

    def work(mesh: Mesh) -> list[tuple[torch.Tensor, torch.Tensor]]:
        ranks: Any = mesh.device_mesh
        local: Any = shardwright.apply(copy.deepcopy(model), plan, ranks["cp", "tp"])
        for part in (*local.model.layers, local):
            fully_shard(part, mesh=ranks["dp"])
        optimizer = train_3d.optimizer_of(local)
        mine = ranks["dp"].get_local_rank()
        made = [train_3d.one_step(local, optimizer, ids[2 * mine :][:2]) for ids in steps]
        for key, found in full_tensors(local, dict(local.named_parameters())).items():
            torch.testing.assert_close(found, after[key].detach(), rtol=0, atol=1e-9)
        return made

    ranks = run_ranks(8, work, {"dp": 2, **MESH})
    for first, second in zip(ranks[:4], ranks[4:], strict=True):
        found = [((a + b) / 2, norm) for (a, norm), (b, _) in zip(first, second, strict=True)]
        torch.testing.assert_close(found, want, rtol=1e-9, atol=0)


def test_what_is_not_proven_is_refused() -> None:
    """A cache, hidden states, and sequences that leave a rank one position."""
    model, _ = planned("llama", 2)
    given = inputs(model, "llama")

    def work(local: nn.Module) -> None:
        cache = local(**{**given, "use_cache": True}).past_key_values
        with pytest.raises(UsageError, match="a cache of a split model"):
            assert cache.layers[0].keys.sum() is not None
        with pytest.raises(UsageError, match="proven for steps with none"):
            local(**given, past_key_values=cache)
        with pytest.raises(UsageError, match="without sequence_parallel or cp"):
            local(**given, output_hidden_states=True)
        with pytest.raises(PlanError, match="3 tokens over cp=2: each rank needs two"):
            local(**inputs(model, "llama", 3))

    on_ranks(work)
    refused: list[dict[str, Any]] = [{"sequence_parallel": True}, {"phase": "decode"}]
    for option in refused:
        with pytest.raises(UsageError, match="cannot be combined with cp=2"):
            planning.plan(model, mesh=MESH, **option)


def test_a_plan_is_proven_and_not_without_its_gathers() -> None:
    """Attention of a part of the keys has the right shape."""
    model, plan = planned("llama", 2)
    shardwright.check(plan, model)
    edited = json.loads(plan.to_json())
    for change in edited["modules"]["model.layers.*.self_attn"]["attention"]:
        if change["slot"] == "key":
            change["target"] = change["source"]
    with pytest.raises(PlanError, match="attention 'key'"):
        shardwright.check(Plan.from_json(json.dumps(edited)), model, accept=True)


def rows_of(given: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """What a rank of `cp` is given of whole sequences: 10 or 9 of 19."""
    start, stop = shard_range(SEQ, mesh[CP].rank, mesh[CP].size)
    return {k: x[:, start:stop] if isinstance(x, Tensor) else x for k, x in given.items()}


def labelled(model: nn.Module, name: str) -> dict[str, Any]:
    """Whole sequences, the second with padding before it, and labels that count on few rows."""
    given = inputs(model, name)
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[1, :4] = 0
    labels = given["input_ids"].clone()
    labels[:, : SEQ // 2] = -100
    labels[0, 1] = 3
    return {**given, "attention_mask": mask, "labels": labels}


@pytest.mark.usefixtures("all_double")
@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("gpt2", 2), ("phi3", 1), ("qwen3_moe", 1)])
def test_ranks_may_pass_their_own_rows(name: str, tp: int) -> None:
    """The loss of all positions, their own logits, all gradients; and of a loss of their own."""
    model, plan = planned(name, tp)
    given, whole = labelled(model, name), copy.deepcopy(model)
    positions = given["attention_mask"].cumsum(-1).sub(1).clamp(min=1)
    wanted = whole(**given, position_ids=positions)
    weights = torch.sin(torch.arange(wanted.logits.numel()).double()).view(wanted.logits.shape)
    wanted.loss.backward(retain_graph=True)
    (wanted.logits * weights).sum().backward()
    gradients = {key: p.grad for key, p in whole.named_parameters()}

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh, cp="local")
        mine = rows_of({**given, "position_ids": positions, "weights": weights}, mesh)
        share, labels = mine.pop("weights"), mine.pop("labels")
        found = local(**mine, labels=labels)
        found.loss.backward()
        own = local(**mine).logits
        (own.local * share).sum().backward()
        close(found.loss, wanted.loss)
        close(own.local, rows_of({"": wanted.logits}, mesh)[""])
        for logits in (own, found.logits):
            close(logits.whole(), wanted.logits)
        assert found.logits.local.shape[1:] == (share.shape[1], share.shape[2] // tp)
        close(full_tensors(local, {k: p.grad for k, p in local.named_parameters()}), gradients)

    run_ranks(2 * tp, work, {"cp": 2, "tp": tp})


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_rows_that_make_no_sequence_are_refused() -> None:
    """On all ranks, whoever of them passed what; and what would need a rule of its own."""
    model, plan = planned("phi3", 1)
    ids = inputs(model, "phi3")["input_ids"]
    balanced = torch.tensor([[0, 1, 2, 9, 10], [3, 4, 5, 6, 7]])

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh, cp="local")
        rank = mesh[CP].rank
        mine, mask = ids[:, :5], torch.ones(BATCH, 5 - rank, dtype=torch.long)
        with pytest.raises(UsageError, match="gave 1 sequences, as input_ids, rank 0 2"):
            local(mine[rank:])
        with pytest.raises(UsageError, match="rank 1 of cp gave no rows, or arguments of several"):
            local(mine, attention_mask=mask)
        with pytest.raises(UsageError, match="rank 1 of cp gave 2 sequences, as input_ids, rank"):
            local(mine, **({} if rank else {"labels": mine}))
        with pytest.raises(UsageError, match="consecutive rows"):
            local(mine, position_ids=balanced[rank : rank + 1])
        with pytest.raises(UsageError, match="does not know" if rank else "argument 'cache_pos"):
            local(mine, **({} if rank else {"cache_position": torch.arange(5)}))
        with pytest.raises(SealedLogitsError, match="take `.local`"):
            local(mine).logits.float()
        with pytest.raises(UsageError, match="generate"):
            local.generate(mine)
        with pytest.raises(UsageError, match="would take the rows of a rank for a sequence"):
            local.model(mine)
        with pytest.raises(UsageError, match='cp="whole"'):
            shardwright.SplitAccelerator(local)

    run_ranks(2, work, {"cp": 2, "tp": 1})
    unsplit = planning.plan(model, tp=2)

    def refused(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match="splits no sequences"):
            apply(copy.deepcopy(model), unsplit, mesh, cp="local")

    run_ranks(2, refused)
