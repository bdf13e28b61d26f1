"""transformers' continuous batching of split models, on processes: tokens of the whole model's."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    ContinuousBatchingConfig,
    DeepseekV3Config,
    LlamaConfig,
)

from benchmarks.forked import run_forked
from shardwright.errors import ModelError
from shardwright.planner.contract.names import PAGED, is_batched
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.prepare import as_planned
from shardwright.planner.trace.data_queries.errors import Unproven
from shardwright.planner.trace.runs.batched_call import NotRead
from shardwright.runtime.api import apply
from shardwright.runtime.calls.batching import AT_ONCE, News, SentRequest, in_messages, shared
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.marks import long
from tests.ranks import run_ranks

from . import on_ranks

TINY = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=50
)


@pytest.mark.parametrize("ranks", [long(2), 3])
def test_tokens_are_those_of_the_whole_model(ranks: int, tmp_path: Path) -> None:
    plans = {
        name: planning.plan(on_ranks.made(config), tp=ranks, continuous_batching=True)
        for name, config in on_ranks.CONFIGS.items()
    }
    last = plans["sliding windows"]
    others = [call for call in last.calls if not is_batched(call.state)]
    unproven = last.model_copy(update={"calls": others}).sealed().to_json()
    told = {name: plan.to_json() for name, plan in plans.items()}
    for end in run_forked(ranks, on_ranks.main, (told, unproven), tmp_path, limit=200):
        assert end.how == "well", (end.text, end.log)


def test_a_plan_is_proven_for_it_on_request() -> None:
    model = on_ranks.made(TINY)
    plans = [planning.plan(model, tp=2, continuous_batching=asked) for asked in (False, True)]
    without, batches = ([call.state for call in plan.calls] for plan in plans)
    assert {PAGED: "TracedPagedCache"} in batches
    assert [state for state in batches if not is_batched(state)] == without
    placed = [{n: m.parameters for n, m in p.modules.items() if m.parameters} for p in plans]
    assert placed[0] == placed[1] != {}
    again = Plan.from_json(plans[1].to_json())
    how = as_planned(again)
    assert how["continuous_batching"]
    assert planning.plan(model, **how).calls == plans[1].calls


def test_a_plan_for_it_trains_with_a_mask() -> None:
    """In batches masks are [batch, 1, tokens, keys], and here [batch, tokens]."""
    model = on_ranks.made(TINY)
    plan = planning.plan(model, tp=2, continuous_batching=True)
    ids = torch.randint(3, 50, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids}

    def step(local: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = local.train()(**given).loss
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in local.named_parameters()}

    def rank(mesh: Mesh) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        local = apply(copy.deepcopy(model), plan, mesh)
        loss, grads = step(local)
        return loss, full_tensors(local, grads)

    want = step(copy.deepcopy(model))
    for loss, grads in run_ranks(2, rank):
        torch.testing.assert_close(loss, want[0])
        torch.testing.assert_close(grads, want[1])


FLEX: dict[str, Any] = {"attn_implementation": "flex_attention"}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (LlamaConfig(**{**TINY.to_dict(), **FLEX}), "is 'flex_attention'"),
        (
            DeepseekV3Config(
                hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=50,
                num_attention_heads=4, num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8,
                qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6, first_k_dense_replace=2,
            ),
            "keys and values have heads of",
        ),
    ],
    ids=["flex", "latent"],
)  # fmt: skip
def test_what_cannot_be_batched(config: object, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        planning.plan(AutoModelForCausalLM.from_config(config), tp=2, continuous_batching=True)


def test_only_models_that_generate_can() -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(ModelError, match="BertModel has no init_continuous_batching"):
        planning.plan(BertModel(config), tp=2, continuous_batching=True)


def test_lengths_for_kernels_are_not_for_models() -> None:
    for read in (NotRead().__getitem__, NotRead().get):
        with pytest.raises(Unproven, match="lengths that are meant for kernels"):
            read("full_attention")


def test_ranks_share_the_memory_of_a_machine_and_keep_the_attention_of_the_plan() -> None:
    cpu = torch.device("cpu")
    assert shared(None, cpu, 4).max_memory_percent == pytest.approx(0.15)
    for config in (
        ContinuousBatchingConfig(num_blocks=8),
        ContinuousBatchingConfig(max_memory_percent=0.5),
    ):
        changed = {"auto_switch_to_flash": False}
        assert vars(shared(config, cpu, 4)) == vars(config) | changed != vars(config)
    assert shared(None, torch.device("cuda"), 4).max_memory_percent is None


def test_many_tokens_are_sent_in_several_messages() -> None:
    long_one = SentRequest("", [1] * (AT_ONCE - 1), False, False, 1, [2], 0, {"top_k": 1})
    found = in_messages([long_one] * 5, ["gone"])
    assert [len(news.requests) for news in found] == [2, 2, 1]
    assert [news.more for news in found] == [True, True, False]
    assert [news.cancelled for news in found] == [[], [], ["gone"]]
    assert in_messages([], ["gone"]) == [News([], ["gone"], False)]
