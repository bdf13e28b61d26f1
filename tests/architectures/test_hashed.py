"""Attention that hashes at random: split, and right where all ranks draw the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import shardwright
from benchmarks.zoo_case import build
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks


def test_tokens_are_hashed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over more tokens than a chunk has (the sweep's are fewer), and with some masked."""
    _, model = build("causal", "reformer", torch.float64)
    plan = planning.plan(model, tp=2)
    assert not any(op.startswith("module") for op in plan.opaque)
    assert not [w for w in plan.replicated if "encoder" in w.parameter]
    draw, calls = torch.randn, []

    def randn(*size: Any, **options: Any) -> torch.Tensor:
        calls.append(size)
        return draw(*size, **options, generator=torch.Generator().manual_seed(5))

    monkeypatch.setattr(torch, "randn", randn)  # threads share torch's own generator
    for length in (19, 40):
        ids = torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        for given in ({}, {"attention_mask": mask}):
            with torch.no_grad():
                want = model(ids, use_cache=False, **given).logits

            def run(mesh: Mesh, ids: Any = ids, given: Any = given) -> torch.Tensor:
                local = shardwright.apply(copy.deepcopy(model), plan, mesh)  # type: ignore[arg-type]
                with torch.no_grad():
                    return local(ids, use_cache=False, **given).logits

            for found in run_ranks(2, run):
                torch.testing.assert_close(found, want, rtol=0, atol=1e-9)
    assert len(calls) == 3 * 4  # of the whole model and two ranks: it did hash
