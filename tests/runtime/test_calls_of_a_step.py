"""What a split model does beside its own code to decode a token: counted, as time is not."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

import shardwright
from benchmarks.speed_counts import Counts, counted
from shardwright.errors import UsageError
from shardwright.runtime.communication import collectives
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.slots import state_of
from tests import planning
from tests.ranks import run_ranks

IDS = torch.arange(8).view(1, -1)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
    "num_hidden_layers": 8,
    "pad_token_id": 0,
}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def phi3() -> Any:
    """Its projections are fused, so its own code reads numbers that are local ones in a call."""
    return Phi3ForCausalLM(Phi3Config(**SIZES)).eval()


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).eval()


@torch.no_grad()
def of_a_step(model: Any) -> Counts:
    """The counts of a step, when one has been made."""
    cache = model(IDS, logits_to_keep=1).past_key_values

    def step() -> None:
        model(IDS[:, -1:], past_key_values=cache)

    step()
    return counted(step, ours=True)


def at_once(
    group: Group, kind: str, x: Tensor, _: str = "sum", spent: bool = False, rows: int = 1
) -> Tensor:
    """In the place of a collective, whose own calls are torch's where ranks are threads."""
    if kind == "all_gather":
        return x.repeat(group.size)
    assert kind == "all_reduce"
    return x if spent else x.clone()


@pytest.mark.parametrize("made", [llama, phi3, mixtral])
def test_a_step_takes_few_more_calls_than_unsplit(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = made()
    plan = planning.plan(copy.deepcopy(base), tp=2, phase="prefill,decode")
    assert {m.layer for m in plan.modules.values()} >= {"ColumnParallelLinear"}
    want = of_a_step(base)
    monkeypatch.setattr(collectives, "_run", at_once)

    def work(mesh: Mesh) -> Counts:
        return of_a_step(shardwright.apply(copy.deepcopy(base), plan, mesh))

    for got in run_ranks(2, work):
        assert got["python_calls"] <= 1.12 * want["python_calls"]
        assert got["aten_calls"] <= 1.1 * want["aten_calls"]
        # All-reduces of what a linear layer gives are in its memory. There are an embedding, the
        # logits, and where there are experts what they give.
        others = 2 + sum(name.endswith("experts") for name, _ in base.named_modules())
        assert got["copies"] <= want["copies"] + others


def test_a_forward_that_its_class_wraps_is_wrapped_once() -> None:
    """As transformers wraps those of checkpointed layers, and of what inherits from them."""
    base = llama()
    plan = planning.plan(copy.deepcopy(base), tp=2, phase="prefill,decode")

    def work(mesh: Mesh) -> Any:
        split: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        return type(split.model.layers[0])

    for kind in run_ranks(2, work):
        own = type(base.model.layers[0])
        assert kind is not own
        assert kind.forward is own.forward


def frames(run: Callable[[], Any]) -> int:
    """How many Python functions of Shardwright `run` calls in this thread."""
    found = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal found
        ours = frame.f_globals.get("__name__", "").startswith("shardwright.")
        found += event == "call" and ours

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture(scope="module")
def two_layers() -> tuple[Any, Any]:
    base = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 2})).eval()
    return base, planning.plan(copy.deepcopy(base), tp=2, phase="prefill,decode")


def test_few_frames_of_ours_run_in_a_step(two_layers: Any) -> None:
    """Of a Llama of two layers, through its first step behind a prefill, and one behind that."""
    base, plan = two_layers

    @torch.no_grad()
    def work(mesh: Mesh) -> list[int]:
        model: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        cache = state_of(model(IDS), model)
        return [frames(lambda: model(IDS[:, -1:], **cache)) for _ in range(2)]

    for counts in run_ranks(2, work):
        assert max(counts) <= 100  # 211 before each module had one boundary


def test_few_frames_of_ours_run_for_a_generated_token(two_layers: Any) -> None:
    base, plan = two_layers
    caches = {None: 105, "static": 160}

    def work(mesh: Mesh) -> list[int]:
        model: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)

        def of_tokens(count: int, kind: str | None) -> int:
            how = {"max_new_tokens": count, "min_new_tokens": count, "cache_implementation": kind}
            return frames(lambda: model.generate(IDS, **how))

        totals = [[of_tokens(count, kind) for count in (3, 4, 5)] for kind in caches]
        return [five - four for _, four, five in totals]  # the first call does more, once

    for counts in run_ranks(2, work):
        assert all(n <= most for n, most in zip(counts, caches.values(), strict=True)), counts


def test_a_call_that_was_proven_proves_no_other(two_layers: Any) -> None:
    """Calls are remembered by the kinds and plain values of their arguments."""
    base, plan = two_layers
    mask = torch.ones_like(IDS)

    @torch.no_grad()
    def work(mesh: Mesh) -> None:
        model: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        for _ in range(2):
            model(IDS, attention_mask=mask, unknown=False)
            for unknown in (True, 1, "yes"):
                with pytest.raises(
                    UsageError, match="'unknown' of LlamaForCausalLM was given in no"
                ):
                    model(IDS, attention_mask=mask, unknown=unknown)
            with pytest.raises(UsageError, match="'attention_mask' .* requires a gradient"):
                model(IDS, attention_mask=mask.float().requires_grad_(), unknown=False)

    run_ranks(2, work)
