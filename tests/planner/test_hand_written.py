"""Tensor-parallel plans of transformers as pins and as baselines.

That of llama makes 6 collectives in a forward of 2 layers and 17 in a training step, that of phi3
10 in a forward and that of olmo2 12, those of deepseek_v32 and longcat_flash 7 and 20: counted on
real ranks with transformers 5.23.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from shardwright.errors import UsageError
from shardwright.planner.hand_written.price import HandWritten, price
from shardwright.planner.prepare import prepare
from shardwright.planner.problem.tp_plan import pins, read, split_dim, style_of, table_of
from shardwright.planner.search.task import Task
from tests import planning, zoo
from tests.cli.conftest import tiny

COLUMNS = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.gate_proj": "colwise"}
PAIRS = {**COLUMNS, "model.layers.*.mlp.down_proj": "rowwise"}
KEPT = "the table does not redistribute the tensor that goes out of"


@cache
def task(name: str, tp: int = 2) -> Task:
    """A traced model of the zoo, or `tiny`; prices do not change it."""
    return prepare(tiny() if name == "tiny" else zoo.build(name)[1], tp)


def priced(name: str, table: Mapping[str, str] | str = "auto", tp: int = 2) -> HandWritten:
    return price(task(name, tp), table_of(table, task(name, tp).source.module))


def calls(hand: HandWritten) -> dict[str, int]:
    assert hand.predicted is not None, hand.problem
    out: Counter[str] = Counter()
    for c in hand.predicted.collectives:
        out[c.phase] += c.count
    return dict(out)


# --- as baselines


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("llama", {"forward": 6, "backward": 11}),
        ("phi3", {"forward": 10, "backward": 9}),
        ("olmo2", {"forward": 12, "backward": 13}),
        ("deepseek_v32", {"forward": 7, "backward": 13}),
        ("longcat_flash", {"forward": 7, "backward": 13}),
    ],
)
def test_collectives_are_those_that_transformers_makes(name: str, counts: dict[str, int]) -> None:
    hand = priced(name)
    assert calls(hand) == counts
    assert hand.unused == []


def test_the_hand_written_plan_costs_what_it_costs_and_ours_no_more() -> None:
    hand, ours = priced("tiny"), planning.plan(tiny(), 2).predicted
    assert hand.predicted is not None and hand.rules == 9
    assert hand.predicted.parameter_bytes == ours.parameter_bytes
    assert sum(calls(hand).values()) > sum(c.count for c in ours.collectives)
    assert hand.predicted.time_ns >= ours.time_ns
    assert hand.replicated == {
        "model.layers.*.input_layernorm.weight": 512,
        "model.layers.*.post_attention_layernorm.weight": 512,
        "model.norm.weight": 256,
    }


def test_what_a_plan_does_not_name_is_whole() -> None:
    hand = priced("tiny", PAIRS)
    assert calls(hand) == {"forward": 2, "backward": 4}
    assert list(hand.replicated)[:2] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert hand.replicated["model.layers.*.self_attn.q_proj.weight"] == 2 * 4 * 64 * 64
    assert hand.predicted is not None
    saved = hand.predicted.unsharded_bytes - hand.predicted.parameter_bytes[0]
    assert saved == 2 * 3 * 4 * 64 * 128 // 2


def test_rules_may_lack_the_prefix_and_fit_nothing() -> None:
    table = {"layers.*.mlp.up_proj": "colwise_rep", "layers.*.mlp.experts": "moe_tp_experts"}
    hand = priced("tiny", table)
    assert calls(hand) == {"forward": 2, "backward": 2}
    assert hand.unused == ["layers.*.mlp.experts"]
    with pytest.raises(UsageError, match="no rule of the tensor-parallel plan fits a module"):
        priced("tiny", {"h.*.mlp": "colwise"})


@pytest.mark.parametrize(
    ("table", "tp", "text"),
    [
        (COLUMNS, 2, f"{KEPT} 'model.layers.0.mlp.up_proj'"),
        ("auto", 4, "q_proj.weight cannot be split by style 'colwise': its shards would not be"),
        ({**PAIRS, "model.norm": "ep_router"}, 2, "style 'ep_router' has no counterpart"),
        ({"model.norm": "sequence_parallel"}, 2, "style 'sequence_parallel' has no counterpart"),
    ],
)
def test_plans_that_have_no_price(table: Mapping[str, str] | str, tp: int, text: str) -> None:
    hand = priced("tiny", table, tp)
    assert hand.predicted is None
    assert hand.problem is not None and text in hand.problem


def test_a_gradient_that_nobody_sums() -> None:
    """It is wrong with transformers 5.23, too: alpha_p of the activation."""
    hand = priced("apertus")
    text = "the gradient of model.layers.0.mlp.act_fn.alpha_p is not summed over the ranks"
    assert hand.problem is not None and text in hand.problem


def test_who_sums_the_gradient_of_a_shared_key() -> None:
    """Of latent attention: heads are split behind it, and it is computed whole."""
    own = table_of("auto", task("minicpm3").source.module)
    shared = {n: s for n, s in own.items() if s == "mla_kv_a_proj"}
    assert shared
    without = priced("minicpm3", {n: s for n, s in own.items() if n not in shared})
    text = f"{KEPT} 'model.layers.0.self_attn.kv_a_proj_with_mqa'"
    assert without.problem is not None and text in without.problem


def test_rows_of_fused_parts_are_no_plain_shards() -> None:
    """Halves of what is q, k and v one after the other are not the halves of each."""
    hand = priced("phi3", {"model.layers.*.self_attn.qkv_proj": "colwise"})
    assert hand.problem is not None
    assert hand.problem.endswith("its shards would not be those that the code splits up")
    packed = {**PAIRS, "model.layers.*.mlp.gate_up_proj": "packed_colwise"}
    assert calls(priced("phi3", packed)) == {"forward": 2, "backward": 2}


# --- reading them


def test_dims_of_styles() -> None:
    found = {
        name: [split_dim(style_of(style), name, ndim) for ndim in (1, 2, 3)]
        for name, style in [("a.weight", "colwise"), ("a.bias", "rowwise"), ("b", "packed_colwise")]
    }
    assert found == {"a.weight": [0, 0, 1], "a.bias": [None, None, None], "b": [0, 0, 1]}
    assert split_dim(style_of("rowwise"), "a.weight", 2) == 1
    assert split_dim(style_of("replicate"), "a.weight", 2) is None


def test_a_rule_of_a_parameter_comes_before_that_of_its_module() -> None:
    module = task("tiny").source.module
    table = {"lm_head": "colwise", "lm_head.weight": "rowwise", "model.layers.1": "replicate"}
    rules = read(table, module)
    assert rules.parameters == {"lm_head.weight": "rowwise"}
    assert rules.modules == {"lm_head": "colwise", "model.layers.1": "replicate"}


def test_plans_as_pins() -> None:
    module = task("tiny").source.module
    assert pins(PAIRS, module) == {
        "model.layers.*.mlp.gate_proj.weight": "shard:0",
        "model.layers.*.mlp.up_proj.weight": "shard:0",
        "model.layers.*.mlp.down_proj.weight": "shard:1",
    }
    wanted = {"model.layers.*.mlp.down_proj.weight": "replicate"}
    plan = planning.plan(tiny(), 2, tp_plan=PAIRS, pins=wanted)
    assert plan.pins["model.layers.*.mlp.up_proj.weight"] == "shard:0"
    assert plan.pins["model.layers.*.mlp.down_proj.weight"] == "replicate"


@pytest.mark.parametrize("table", [{}, {"a": 1}, "other"])
def test_no_table(table: Any) -> None:
    with pytest.raises(UsageError, match="tensor-parallel plan"):
        planning.plan(tiny(), 2, tp_plan=table)


def test_a_model_without_one() -> None:
    with pytest.raises(UsageError, match="GPT2LMHeadModel has no tensor-parallel plan"):
        planning.plan(zoo.build("gpt2")[1], 2, tp_plan="auto")
