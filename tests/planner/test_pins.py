"""Pins: what they keep, and how those that cannot hold are refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.errors import InfeasibleError, ShardwrightError, UsageError
from shardwright.planner.problem.pins import Pin, as_pins, as_table, gather, make_pin, matches
from tests import planning, zoo
from tests.cli.conftest import tiny
from tests.planner.test_search import Within

MLP = "model.layers.*.mlp"
ATTENTION = "model.layers.*.self_attn"


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("model.layers.*.mlp.*", "model.layers.11.mlp.up_proj.weight", True),
        ("model.layers.*.mlp", "model.layers.11.mlp.up_proj.weight", True),
        ("model.layers.*.mlp.*.bias", "model.layers.11.mlp.up_proj.weight", False),
        ("model.layers.1", "model.layers.11.mlp.up_proj.weight", False),
        ("model.layers.*.*.[qkv]_proj", "model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.*.*.[qkv]_proj", "model.layers.0.self_attn.o_proj.weight", False),
        ("*", "lm_head.weight", True),
        ("*.weight", "model.norm.weight", False),
        ("lm_head.weight.data", "lm_head.weight", False),
    ],
)
def test_names_fit_part_by_part(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits


def test_pins_as_text_and_back() -> None:
    pins = as_pins({"a.b": "replicate", "c": "shard:1"})
    assert pins == (Pin("a.b", None), Pin("c", 1))
    assert [str(p) for p in pins] == ["a.b=replicate", "c=shard:1"]
    assert as_table(pins) == {"a.b": "replicate", "c": "shard:1"}


@pytest.mark.parametrize("placement", ["whole", "shard", "shard:", "shard:-1", "shard:x", "", 0])
def test_no_placement(placement: object) -> None:
    with pytest.raises(UsageError, match="is not a pin: write NAME=replicate or NAME=shard:DIM"):
        make_pin("lm_head.weight", placement)


def test_pins_of_the_command_line_come_after_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pins.json"
    path.write_text(json.dumps({"a": "replicate", "b": "shard:0"}))
    assert list(gather(["c=shard:1", "a=replicate"], path)) == ["a", "b", "c"]
    with pytest.raises(UsageError, match="pins b=shard:0 and b=shard:1 contradict each other"):
        gather(["b=shard:1"], path)


@pytest.mark.parametrize(
    ("text", "error"),
    [("[]", "holds no JSON object"), ("{", "is not JSON"), (None, "cannot read .*: No such file")],
)
def test_files_that_hold_no_pins(tmp_path: Path, text: str | None, error: str) -> None:
    path = tmp_path / "pins.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=error):
        gather([], path)


# --- what they do


def test_a_pinned_module_is_whole_and_the_plan_says_who_wanted_it() -> None:
    plan = planning.plan(tiny(), 2, pins={f"{MLP}.*": "replicate"})
    assert plan.pins == {f"{MLP}.*": "replicate"}
    assert not [name for name in plan.modules if ".mlp" in name]
    assert f"{ATTENTION}.q_proj" in plan.modules
    assert {w.reason for w in plan.replicated if ".mlp." in w.parameter} == {"a pin asks for it"}
    free = planning.plan(tiny(), 2)
    assert f"{MLP}.up_proj" in free.modules
    assert free.pins == {}


@pytest.mark.parametrize("dim", [0, 1])
def test_a_pin_decides_the_dim(dim: int) -> None:
    plan = planning.plan(tiny(), 2, pins={"model.embed_tokens.weight": f"shard:{dim}"})
    found = plan.modules["model.embed_tokens"].parameters["weight"].placement
    assert found == ("256@tp, 64", "256, 64@tp")[dim]


def test_one_layer_may_be_pinned_alone() -> None:
    plan = planning.plan(tiny(), 2, pins={"model.layers.1.mlp": "replicate"})
    assert "model.layers.0.mlp.up_proj" in plan.modules
    assert "model.layers.1.mlp.up_proj" not in plan.modules


def test_fused_parameters_are_split_part_by_part() -> None:
    _, module = zoo.build("gpt2")
    plan = planning.plan(module, 2, pins={"transformer.h.*.attn.c_attn.weight": "shard:1"})
    spec = plan.modules["transformer.h.*.attn.c_attn"].parameters
    assert spec["weight"].placement.count("@tp") == 3
    with pytest.raises(UsageError, match=r"c_attn.bias has shape \[\d+\], so no dim 1"):
        planning.plan(module, 2, pins={"transformer.h.0.attn.c_attn.bias": "shard:1"})


# --- what cannot hold


@pytest.mark.parametrize(
    ("pins", "kind", "error"),
    [
        ({"lm_hed": "shard:0"}, UsageError,
         "no parameter or module of the model is named 'lm_hed'; did you mean lm_head?"),
        ({"lm_head": "shard:2"}, UsageError,
         "pin lm_head=shard:2: lm_head.weight has shape [256, 64], so no dim 2"),
        ({"model.layers.*": "replicate", "model.layers.0.mlp": "shard:0"}, UsageError,
         "pins model.layers.*=replicate and model.layers.0.mlp=shard:0 contradict each other on "
         "model.layers.0.mlp.gate_proj.weight"),
        ({"model.rotary_emb.inv_freq": "shard:0"}, InfeasibleError,
         "pin model.rotary_emb.inv_freq=shard:0: dim 0 of model.rotary_emb.inv_freq cannot be "
         "split: it is a buffer, and those stay replicated"),
        ({"model.norm": "shard:0"}, InfeasibleError,
         "model.norm.weight=shard:0 cannot hold; what forbids it: a hidden state between blocks "
         "must be replicated; mul in 'model.norm'"),
        ({"lm_head": "shard:1"}, InfeasibleError,
         "lm_head.weight=shard:1 cannot hold; what forbids it: the scores of a loss are not "
         "Partial; linear in 'lm_head' (modeling_llama.py:"),
    ],
)  # fmt: skip
def test_refusals(pins: dict[str, str], kind: type[ShardwrightError], error: str) -> None:
    with pytest.raises(kind) as found:
        planning.plan(tiny(), 2, pins=pins)
    assert isinstance(found.value, InfeasibleError) is (kind is InfeasibleError)
    assert error in str(found.value)
    assert "\n" not in str(found.value)


class TwoInOne(nn.Module):
    """Two products in one module: between them nothing can be gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(16, 8)), nn.Parameter(torch.ones(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a.T @ self.b.T


def test_pins_that_cannot_hold_together() -> None:
    make = partial(shardwright.plan, Within(TwoInOne()), 2, args=(torch.ones(3, 19, 8),))
    assert make(pins={"inner.a": "shard:0", "inner.b": "shard:1"}).modules
    for name in ("inner.a", "inner.b"):
        assert make(pins={name: "shard:0"}).modules
    with pytest.raises(InfeasibleError) as error:
        make(pins={"inner": "shard:0"})
    text = "inner.a=shard:0 and inner.b=shard:0 cannot hold together; what forbids it: "
    assert str(error.value).startswith(text)


def test_tied_parameters_are_one() -> None:
    _, module = zoo.build("gpt2")
    pins = {"transformer.wte": "replicate", "lm_head": "shard:0"}
    with pytest.raises(UsageError, match=r"on lm_head.weight \(tied to transformer.wte.weight\)"):
        planning.plan(module, 2, pins=pins)


def test_an_axis_shorter_than_the_ranks() -> None:
    with pytest.raises(InfeasibleError, match="none of which 61 ranks could share"):
        planning.plan(tiny(), 61, pins={f"{ATTENTION}.q_proj": "shard:0"})
    with pytest.raises(InfeasibleError, match="its size is 64, and there are 65 ranks"):
        planning.plan(tiny(), 65, pins={f"{ATTENTION}.q_proj": "shard:1"})
