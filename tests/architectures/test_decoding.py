"""Steps with a cache are in the plan's calls, proven, and equal those of the whole model."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.mesh import Mesh
from tests import planning, zoo
from tests.ranks import run_ranks

KINDS = {"t5": "seq2seq", "bart": "seq2seq"}
NAMES = ["llama", "gpt2", "mistral", "falcon", "mamba2", "bamba", "t5"]
"""One has a sliding window, one a sole key and value head; recurrent ones, with cross-attention."""


@cache
def made(name: str, tp: int) -> tuple[nn.Module, Plan]:
    _, model = zoo.build(name, kind=KINDS.get(name, "causal"))
    plan = planning.plan(model, tp=tp)
    return model.double(), plan


def ids(length: int) -> torch.Tensor:
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(length))


def decoded(model: Any, lengths: tuple[int, ...] = (5, 1, 1, 3)) -> list[torch.Tensor]:
    """The scores of calls with so many tokens, each with the cache of that before."""
    out: list[torch.Tensor] = []
    encoder = {"input_ids": ids(7)} if model.config.is_encoder_decoder else {}
    grows = "decoder_input_ids" if encoder else "input_ids"
    state: dict[str, Any] = {}
    with torch.no_grad():
        for n in lengths:
            found = model(**encoder, **{grows: ids(n)}, use_cache=True, **state)
            names = ("past_key_values", "cache_params")
            state = {k: found[k] for k in names if found.get(k) is not None}
            assert state
            out.append(found.logits)
    return out


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_those_of_the_whole_model(name: str, tp: int) -> None:
    model, plan = made(name, tp)
    assert any(call.state for call in plan.calls)
    assert plan.predicted.collectives, "it is split"
    want = decoded(model)

    def work(mesh: Mesh) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        for got, expected in zip(decoded(local), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)

    run_ranks(tp, work)
