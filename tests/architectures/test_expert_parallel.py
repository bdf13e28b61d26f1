"""Experts spread over ranks that take different sequences: tokens travel to them and back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning, zoo
from tests.marks import long
from tests.ranks import copy_number, run_ranks

ROWS, TOKENS = 4, 12
EXACT, ROUNDED = 1e-9, 1e-6
"""Of gradients, relative to the largest of their parameter; the second with float32 in the code."""


def built(name: str) -> torch.nn.Module:
    """In float64, which torch's grouped product does not know."""
    model: Any = zoo.build(name)[1]
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double()


def loss(logits: torch.Tensor) -> torch.Tensor:
    """A mean over sequences in which each logit counts differently."""
    weights = torch.sin(torch.arange(logits[0].numel(), dtype=torch.float64)).view(logits[0].shape)
    return (logits * weights).sum((1, 2)).mean()


def assert_equal_to_one_process(model: Any, mesh: dict[str, int], tolerance: float) -> None:
    """Logits, and all gradients."""
    copies = mesh["ep"] * mesh.get("dp", 1)
    rows = max(ROWS, copies)
    plan = planning.plan(model, mesh=mesh, phase="train", batch=rows)
    ids = torch.randint(3, 100, (rows, TOKENS), generator=torch.Generator().manual_seed(3))
    whole = copy.deepcopy(model)
    want = whole(ids, use_cache=False).logits
    loss(want).backward()
    gradients = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}

    def work(at: Mesh) -> None:
        local = shardwright.apply(copy.deepcopy(model), plan, at)
        part = copy_number(at)
        logits = local(ids.chunk(copies)[part], use_cache=False).logits
        torch.testing.assert_close(logits, want.chunk(copies)[part], rtol=0, atol=1e-9)
        loss(logits).backward()
        found = full_tensors(local, {n: p.grad for n, p in local.named_parameters()})
        for key, gradient in gradients.items():
            most = max(float(gradient.abs().max()), 1e-2)
            assert float((found[key] - gradient).abs().max()) <= tolerance * most, key

    run_ranks(copies * mesh["tp"], work, mesh)


@pytest.mark.parametrize(
    ("name", "mesh", "tolerance"),
    [
        ("qwen3_moe", {"ep": 2, "tp": 2}, EXACT),
        long("mixtral", {"dp": 2, "ep": 2, "tp": 1}, ROUNDED),
        long("dbrx", {"ep": 2, "tp": 2}, EXACT),
        long("gpt_oss", {"ep": 2, "tp": 1}, ROUNDED),
        long("deepseek_v3", {"dp": 2, "ep": 2, "tp": 2}, ROUNDED),
        long("olmoe", {"ep": 4, "tp": 2}, EXACT),
    ],
)
def test_logits_and_gradients(name: str, mesh: dict[str, int], tolerance: float) -> None:
    assert_equal_to_one_process(built(name), mesh, tolerance)


# Tokens lie by expert; one of five ranks has no expert, and another part of the rows than it gets.
@pytest.mark.parametrize("mesh", [long({"ep": 4, "tp": 1}), {"ep": 5, "tp": 2}])
def test_tokens_that_lie_by_expert(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the router
    assert_equal_to_one_process(built("llama4_text"), mesh, EXACT)


def test_loaded_from_disk_and_generating(tmp_path: Path) -> None:
    """Ranks whose sequences end earlier compute tokens of others; what is saved is the same."""
    model: Any = zoo.build("qwen3_moe", num_hidden_layers=1)[1]
    model.save_pretrained(tmp_path / "model")
    plan = planning.plan(str(tmp_path / "model"), mesh={"ep": 2, "tp": 1}, batch=2)
    ids = torch.randint(3, 100, (2, TOKENS), generator=torch.Generator().manual_seed(5))
    how: Any = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    free = model.generate(ids, eos_token_id=None, **how)
    end = int(free[0, TOKENS + 1])  # the first sequence ends after two tokens
    want = [model.generate(ids[i : i + 1], eos_token_id=end, **how) for i in range(2)]
    stored = {n: p.detach().clone() for n, p in model.named_parameters()}

    def work(at: Mesh) -> int:
        local: Any = shardwright.load(tmp_path / "model", plan, mesh=at.device_mesh)
        rank = at["ep"].rank
        made = local.generate(ids[rank : rank + 1], eos_token_id=end, **how)
        assert torch.equal(made, want[rank])
        shardwright.save(local, tmp_path / "saved")
        return local.shardwright_report.held

    held = run_ranks(2, work, {"ep": 2, "tp": 1})
    assert max(held) <= max(plan.predicted.parameter_bytes) < plan.predicted.unsharded_bytes
    again = type(model).from_pretrained(tmp_path / "saved")
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, stored[name]), name
