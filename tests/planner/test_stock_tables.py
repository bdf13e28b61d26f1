"""Plans as tables of transformers' styles: what is said, what is not, what a rank then holds."""

import math
import textwrap
from functools import cache
from typing import Any

import pytest
from transformers import LlamaConfig
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.exports import export
from shardwright.planner.exports.stock.runtimes import _not_in_vllm, by_class, source
from shardwright.planner.exports.stock.table import MAX_RATIO, WHOLE, candidates, held
from shardwright.planner.on_ranks.small import small
from shardwright.planner.on_ranks.stock import Ran
from shardwright.planner.problem.tp_plan import general
from shardwright.runtime.in_transformers import tp_plan
from tests import planning, zoo


@cache
def plan_of(name: str, tp: int) -> Plan:
    return planning.plan(zoo.build(name)[1], tp=tp)


def planned(name: str, tp: int = 2) -> tuple[Plan, Any]:
    return plan_of(name, tp), zoo.build(name)[1]


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_a_table_is_that_which_people_wrote(name: str) -> None:
    plan, model = planned(name)
    table = next(candidates(plan, model))
    theirs = {k: s for k, s in (model.tp_plan or {}).items() if "gate" not in k.split(".")}
    assert {k: table[k] for k in theirs if k in table} == theirs
    assert sum(held(table, model, 2).values()) == max(plan.predicted.parameter_bytes)
    base, head = by_class(table, model)
    assert "layers.*.self_attn.q_proj" in base and head == {"lm_head": "colwise_gather_output"}


def test_where_code_counts_heads_itself_layers_are_gathered() -> None:
    """Styles set no integers; the MLP beside has none, and stays split while it computes."""
    plan, model = planned("bloom")
    table = next(candidates(plan, model))
    block = "transformer.h.*"
    assert plan.module("transformer.h.0.self_attention").attributes  # type: ignore[union-attr]
    assert table[f"{block}.self_attention.query_key_value"] == "colwise_gather_output"
    assert table[f"{block}.self_attention.dense"] == "rowwise_split_input"
    assert table[f"{block}.mlp.dense_h_to_4h"] == "colwise"


def least(plan: Plan, model: Any) -> dict[str, str]:
    """The first table by which a rank holds no more than by the plan."""
    ours = MAX_RATIO * max(plan.predicted.parameter_bytes)
    return next(t for t in candidates(plan, model) if sum(held(t, model, 2).values()) <= ours)


def test_what_no_style_is_made_for_torch_computes() -> None:
    """GPT-2 has Conv1D, with rows where a linear layer has columns: split in memory only."""
    table = least(*planned("gpt2"))
    inside = {k.split("mlp.")[1]: style for k, style in table.items() if "mlp." in k}
    assert inside == {
        "c_fc": "embedding_rowwise", "c_fc.weight": "embedding_colwise",
        "c_proj": "embedding_rowwise",
    }  # fmt: skip


def test_layers_that_share_a_name_share_a_style() -> None:
    """transformers has one rule for `h.*.ffn.0` and `h.*.ffn.2`: columns, and rows, and a ReLU."""
    table = least(*planned("ctrl"))
    inside = {k: style for k, style in table.items() if ".ffn." in k}
    assert inside == {"transformer.h.*.ffn.*": "embedding_rowwise"}


def test_who_sums_a_gradient() -> None:
    """Of latents transformers sums what bypasses the next colwise layer; that sums the rest."""
    plan, model = planned("longcat_flash")
    table = next(candidates(plan, model))
    block = "model.layers.*"
    assert plan.module("model.layers.0.self_attn.0.kv_a_layernorm").parameters["weight"].use  # type: ignore[union-attr]
    assert table[f"{block}.self_attn.*.kv_a_proj_with_mqa"] == "mla_kv_a_proj"
    assert f"{block}.self_attn.*.kv_a_layernorm" not in table
    assert table[f"{block}.mlp.experts.identity_expert"] == "moe_identity_expert"


def test_key_heads_that_ranks_share_are_not_colwise() -> None:
    """Two key heads on four ranks: transformers would give each rank half of one."""
    plan, model = planned("llama", tp=4)
    table = next(candidates(plan, model))
    assert table["model.layers.*.self_attn.k_proj"] != "colwise"


def test_rules_of_the_model_that_the_plan_has_not_are_taken_back() -> None:
    """transformers merges a table into the model's own."""
    plan, model = planned("llama")
    model._tp_plan = {**model.tp_plan, "model.norm": "sequence_parallel"}
    assert next(candidates(plan, model))["model.norm"] == WHOLE


def test_source_for_torch_ties_what_was_tied() -> None:
    model: Any
    _, model = zoo.build("llama", tie_word_embeddings=True)
    model.tie_weights()
    plan = planning.plan(model, tp=2)
    code: dict = {}
    exec(source(next(candidates(plan, model)), model), code)
    assert code["TIED"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert set(code["STYLES"]) >= {"lm_head", "model.layers.*.mlp.up_proj"}


def test_a_small_model_has_the_same_modules_and_heads() -> None:
    config = LlamaConfig(num_hidden_layers=32, num_key_value_heads=8, vocab_size=32000)
    config.architectures = ["LlamaForCausalLM"]
    model, inputs = small(config)
    made: Any = model.config
    assert (made.num_attention_heads, made.num_key_value_heads) == (32, 8)
    assert made.num_hidden_layers == 2 and made.hidden_size < 1024
    assert inputs["input_ids"].max() < made.vocab_size


def test_our_style_stands_for_all_of_a_plan() -> None:
    plan, _ = planned("gpt2")
    table = tp_plan(plan)
    assert {"transformer.wte": "embedding_rowwise"} | table == table
    assert set(table) == {"transformer", "lm_head"} and len(set(table.values())) == 1
    with pytest.raises(PlanError, match="was edited"):
        tp_plan(plan.model_copy(update={"opaque": {"op": 1}}))


@pytest.mark.parametrize(
    ("ran", "to", "options"),
    [
        (Ran(1.0, 0.0, "w", 1e-9, 1, 2), "transformers", {}),
        (Ran(0.0, math.nan, "w", 1e-9, 1, 2), "torch", {}),
        (Ran(0.0, 0.0, "w", 1e-9, 2, 2), "pull-request", {}),  # nothing was split
        (Ran(0.0, 1.0, "w", 1e-9, 1, 2), "transformers", {"own_styles": True}),
        (Ran(0.0, 0.0, "w", 1e-9, 2, 2), "transformers", {"own_styles": True}),
    ],
)
def test_what_is_not_seen_to_be_right_is_not_exported(monkeypatch, ran, to, options) -> None:
    monkeypatch.setattr("shardwright.planner.exports.stock.proven.try_out", lambda *_: ran)
    plan, model = planned("llama")
    with pytest.raises(PlanError, match="from the unsplit model"):
        export(plan, to, model=model, **options)


def test_a_pull_request_has_what_to_set_and_a_script(monkeypatch) -> None:
    ran = Ran(1e-12, 1e-12, "w", 1e-9, 1, 4)
    monkeypatch.setattr("shardwright.planner.exports.stock.proven.try_out", lambda *_: ran)
    plan, model = planned("gpt2")
    text = export(plan, "pull-request", model=model)
    assert isinstance(text, str)
    blocks = [textwrap.dedent(part.partition("```")[0]) for part in text.split("```python\n")[1:]]
    base, head, script = blocks
    assert "In `GPT2Config` (src/transformers/models/gpt2/configuration_gpt2.py" in text
    found: dict[str, Any] = {}
    exec(base + head, found)
    assert found["base_model_tp_plan"]["h.*.mlp.c_fc"] == "embedding_rowwise"
    assert found["_tp_plan"] == {"lm_head": "colwise_gather_output"}
    assert '"h.*.mlp.c_fc": "embedding_rowwise",  # gathered: a Conv1D' in base
    compile(script, "check_tp.py", "exec")


def test_what_is_missing_or_not_taken() -> None:
    plan, _ = planned("gpt2")
    with pytest.raises(UsageError, match="give the MODEL"):
        export(plan, "transformers")
    with pytest.raises(UsageError, match="'csv' does not take model"):
        export(plan, "csv", model="x")
    _, other = zoo.build("llama")
    with pytest.raises(UsageError, match="does not take own_styles"):
        export(plan, "torch", model=other, own_styles=True)
    with pytest.raises(PlanError, match="the plan is for a GPT2LMHeadModel"):
        export(plan, "torch", model=other)


def test_of_two_numbers_in_a_row_a_rule_names_the_first_alone() -> None:
    """As transformers does, which refuses rules that name nothing."""
    replaced = replace_layer_number_by_wildcard("model.layers.3.list.0.1.weight")
    assert general("model.layers.3.list.0.1.weight") == replaced == "model.layers.*.list.*.1.weight"


def test_what_vllm_has_a_style_for() -> None:
    """Columns and rows within blocks; the embedding and the head it shards by itself."""
    block = "model.layers.*"
    table = {
        f"{block}.q_proj": "colwise", f"{block}.o_proj": "rowwise", f"{block}.norm": WHOLE,
        "model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output",
    }  # fmt: skip
    assert _not_in_vllm(table) is None
    why = _not_in_vllm({**table, f"{block}.q_proj": "colwise_gather_output"}) or ""
    assert f"for {block}.q_proj, is not exported for vLLM" in why and "SHARDWRIGHT_PLAN" in why
