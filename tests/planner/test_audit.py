"""Hand-written tables are held against the rules: right ones give no alarm, and faults are named.

What is wrong with apertus, doge and lfm2 in transformers 5.23 was found by running them on ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.audit_faults import planted
from shardwright.planner.hand_written.audit import OPEN, RIGHT, TRAINING, WRONG, Audited, audit
from shardwright.planner.hand_written.block_cuts import cuts_in_blocks
from shardwright.planner.hand_written.expert_table import audit_experts
from shardwright.planner.prepare import prepare
from shardwright.planner.problem.tp_plan import read, table_of
from shardwright.planner.search.restrictions import Formulation, Restrictions, formulate
from shardwright.planner.search.task import Task
from tests import zoo
from tests.cli.conftest import tiny


@cache
def traced(name: str) -> tuple[Task, dict[str, str], Formulation]:
    model: Any = tiny() if name == "tiny" else zoo.build(name, randomize=False)[1]
    task = prepare(model, 2)
    return task, table_of("auto", task.source.module), formulate(task, Restrictions())


def audited(name: str, changes: Mapping[str, str | None] | None = None) -> Audited:
    task, table, posed = traced(name)
    changed = {**table, **(changes or {})}
    return audit(task, {k: style for k, style in changed.items() if style}, posed)


@pytest.mark.parametrize("name", ["tiny", "phi3", "deepseek_v3"])
def test_right_tables_give_no_alarm(name: str) -> None:
    found = audited(name)
    assert (found.verdict, found.fault, found.unused) == (RIGHT, None, ())
    assert found.predicted is not None


@pytest.mark.parametrize(
    ("name", "verdict", "text"),
    [
        ("apertus", TRAINING, "no style sums the partial gradient"),
        ("doge", WRONG, "add in 'model.layers.0.self_attn' (modeling_doge.py:"),
        ("lfm2", WRONG, "is a partial sum, and no style redistributes it there"),
    ],
)
def test_what_is_wrong_in_transformers(name: str, verdict: str, text: str) -> None:
    found = audited(name)
    assert found.verdict == verdict and found.fault is not None
    assert text in found.fault.text


def expert_verdict(changes: Mapping[str, str | None], ranks: int = 2) -> tuple[str, str]:
    task, *_ = traced("mixtral")
    model: Any = task.source.module
    table = {**model.ep_plan, **changes}
    found = audit_experts(task, {k: style for k, style in table.items() if style}, ranks)
    return found.verdict, found.fault.text if found.fault else ""


EXPERTS = "model.layers.*.mlp.experts"


@pytest.mark.parametrize(
    ("changes", "verdict", "text"),
    [
        ({}, RIGHT, ""),
        ({f"{EXPERTS}.down_proj": None}, WRONG, "keeps all rows of down_proj, of which ranks use"),
        ({EXPERTS: None}, WRONG, "down_proj is sharded by expert, and no tokens are taken to them"),
        (
            {"model.layers.*.mlp.gate.weight": "grouped_gemm"},
            WRONG,
            "gate.weight is sharded by exp",
        ),
        ({"model.layers.*.mlp": "ep_dispatch_experts"}, OPEN, "mlp' is not proven to be a mixture"),
        ({"lm_head": "colwise"}, OPEN, "style 'colwise' on lm_head: only styles of experts are"),
    ],
)
def test_tables_of_experts(changes: dict[str, str | None], verdict: str, text: str) -> None:
    found = expert_verdict(changes)
    assert found[0] == verdict
    assert text in found[1]


def test_experts_that_ranks_cannot_share_equally() -> None:
    assert expert_verdict({}, 3) == (
        WRONG, "'model.layers.0.mlp.experts' has 4 experts, which 3 ranks cannot share equally"
    )  # fmt: skip


def test_every_planted_fault_is_named() -> None:
    """With the op, the module, and the file and line of the model's code."""
    faults = dict(planted(traced("tiny")[1]))
    for what, table in list(faults.items())[::5]:
        found = audit(traced("tiny")[0], table, traced("tiny")[2])
        assert found.verdict in (WRONG, TRAINING), what
        assert found.fault is not None and found.fault.where.startswith("modeling_llama.py:"), what


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mlp.down_proj": None}, "linear in 'model.layers.0.mlp.down_proj' (modeling_llama.py:"),
        ({"mlp.up_proj": None}, "mul in 'model.layers.0.mlp' (modeling_llama.py:"),
        ({"self_attn.k_proj": None}, "attention in 'model.layers.0.self_attn' (modeling_llama.py:"),
        (
            {"mlp": "all_reduce"},
            "after style 'rowwise' the style of a module around does not fit",
        ),
        ({"mlp.down_proj": None, "mlp.down_proj.weight": "rowwise"}, "add in 'model.layers.0' "),
        ({"input_layernorm": "replicated_with_grad_allreduce"}, "'model.layers.0.input_layern"),
    ],
)
def test_where_a_table_goes_wrong(change: dict[str, str | None], text: str) -> None:
    found = audited("tiny", {f"model.layers.*.{k}": style for k, style in change.items()})
    assert found.verdict in (WRONG, TRAINING)
    assert found.fault is not None and text in found.fault.text


def test_what_is_split_at_the_end_is_wrong() -> None:
    fault = audited("tiny", {"lm_head": "colwise"}).fault
    assert fault is not None
    text = "an output of the model must be replicated, but it is split along dim 2: linear in "
    assert fault.text.startswith(f"{text}'lm_head'")


def test_fewer_key_heads_than_ranks() -> None:
    task = prepare(tiny(), 4)
    fault = audit(task, table_of("auto", task.source.module)).fault
    assert fault is not None and "_proj.weight cannot be split by style 'colwise'" in fault.text
    assert (fault.op, fault.module) == ("view", "model.layers.0.self_attn")


def test_styles_that_are_not_known_are_not_decided() -> None:
    found = audited("tiny", {"model.norm": "sequence_parallel"})
    assert found.verdict == OPEN
    assert found.fault is not None and "has no counterpart here" in found.fault.text


def test_a_style_on_another_module() -> None:
    fault = audited("tiny", {"model.norm": "colwise"}).fault
    assert fault is not None and "LlamaRMSNorm has no out_features" in fault.text


class Heads(nn.Module):
    """Attention without attention: the code splits a projection up into heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], self.heads, 4)
        return self.o(q.softmax(-1).flatten(2))


@pytest.mark.parametrize(("heads", "verdict"), [(4, WRONG), (-1, RIGHT)])
def test_sizes_that_the_code_gets_wrong(heads: int, verdict: str) -> None:
    """Transformers changes no attributes: a number of heads is that of the full model."""
    task = prepare(Heads(heads), 2, args=torch.zeros(3, 19, 16))
    found = audit(task, {"q": "colwise", "o": "rowwise"})
    assert found.verdict == verdict
    if found.fault:
        assert found.fault.op == "view" and "the code computes 4 for dim 2" in found.fault.text
        assert "a rank has 2" in found.fault.text


def test_cuts_inside_of_blocks() -> None:
    """Of weights with scales for 128 x 128: 384 rows of 2 ranks are cut in the second block."""
    layers = nn.ModuleDict({"up": nn.Linear(256, 384), "down": nn.Linear(384, 256)})
    rules = read({"up": "colwise", "down": "rowwise"}, layers)
    cuts = {"up.weight": "dim 0 of 384 cut after 192", "down.weight": "dim 1 of 384 cut after 192"}
    assert cuts_in_blocks(layers, rules, 2) == cuts
    assert cuts_in_blocks(layers, rules, 3) == {}
