"""`shardwright explain` and `shardwright diff`."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from shardwright.planner.contract.plan_file import Plan
from tests import planning, zoo
from tests.cli.conftest import Run, tiny

Planned = tuple[Path, Result]


def words(result: Result) -> list[str]:
    assert max(map(len, result.stdout.splitlines())) <= 100
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def explained(run: Run, plan: Path, name: str, model: Path | None) -> list[dict[str, Any]]:
    result = run("explain", plan, name, *([model] if model else []), "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# --- explain


def test_what_is_chosen_has_a_price_for_each_alternative(
    run: Run, model: Path, planned: Planned
) -> None:
    """The price is the difference to a plan in which only that is pinned."""
    [found] = explained(run, planned[0], "model.layers.*.mlp.up_proj.weight", model)
    assert (found["placement"], found["count"]) == ("column 128@tp", 2)
    assert found["together"] == [
        "model.layers.*.mlp.down_proj.weight, dim 1",
        "model.layers.*.mlp.gate_proj.weight, dim 0",
    ]
    assert [a["placement"] for a in found["alternatives"]] == ["replicate", "shard:1"]
    now = Plan.load(planned[0]).predicted
    for alternative in found["alternatives"]:
        pins = {found["name"]: alternative["placement"]}
        then = planning.plan(model, 2, pins=pins).predicted
        assert alternative["bytes"] == then.parameter_bytes[0] - now.parameter_bytes[0]
        assert alternative["time_ns"] == then.time_ns - now.time_ns
        assert alternative["impossible"] == []
    assert found["alternatives"][0]["bytes"] == 2 * 4 * 64 * 64


def test_what_has_the_same_axis_is_tied_by_a_chain_of_ops(
    run: Run, model: Path, planned: Planned
) -> None:
    """From one parameter to the other; in words without those that compute nothing."""
    name = "model.layers.*.self_attn.q_proj.weight"
    [found] = explained(run, planned[0], name, model)
    assert [*found["ties"]] == found["together"]
    chain = found["ties"]["model.layers.*.self_attn.o_proj.weight, dim 1"]
    block = "model.layers.0.self_attn"
    assert [chain[0]["module"], chain[-1]["module"]] == [f"{block}.q_proj", f"{block}.o_proj"]
    assert all(link["source"].startswith("modeling_llama.py:") for link in chain)
    assert {"op": "view", "moves": True}.items() <= chain[1].items()
    lines = words(run("explain", planned[0], name, model))
    at = lines.index("model.layers.*.self_attn.o_proj.weight, dim 1")
    text = " ".join(lines[at + 1 : at + 3])
    assert text.startswith("by linear (self_attn.q_proj) > mul (self_attn) > add > ")
    assert " scaled_dot_product_attention > linear (self_attn.o_proj)" in text


def test_what_cannot_be_has_the_ops_that_forbid_it(run: Run, model: Path, planned: Planned) -> None:
    result = run("explain", planned[0], "model.layers.1.input_layernorm", model)
    found = words(result)
    assert found[0] == "model.layers.*.input_layernorm.weight (64, 2 times)"
    assert "because nothing else is possible" in found
    assert "shard:0 is impossible, because of" in found
    reasons = [line for line in found if line.startswith("- ")]
    assert [r.split(" in ")[0] for r in reasons] == ["- pow", "- mean", "- mul", "- mul"]
    assert all("_layernorm' (modeling_llama.py:" in r for r in reasons)


def test_an_axis_that_is_too_short_is_said_to_be(run: Run, tmp_path: Path) -> None:
    config, module = zoo.build("gpt2")
    config.architectures = [type(module).__name__]
    config.save_pretrained(tmp_path)
    path = tmp_path / "plan.json"
    assert run("plan", tmp_path, "--tp", 17, "-q", "-o", path).exit_code == 0
    [found] = explained(run, path, "transformer.h.*.attn.c_attn.weight", tmp_path)
    texts = {a["placement"]: a["impossible"] for a in found["alternatives"]}
    assert texts["shard:1"] == [
        "the code takes it apart into 4 and 16, none of which 17 ranks could share"
    ]


def test_a_pin_is_the_reason(run: Run, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run("plan", small, "--tp", 2, "--pin", "model.layers.*.mlp=replicate", "-q", "-o", path)
    found = words(run("explain", path, "model.layers.*.mlp.up_proj", small))
    assert "placed replicated" in found
    assert "because a pin asks for it: model.layers.*.mlp=replicate" in found
    [again] = explained(run, path, "model.layers.0.mlp.up_proj", small)
    assert again["alternatives"][0]["placement"] == "shard:0"
    assert again["alternatives"][0]["bytes"] < 0


def test_without_a_model_the_plan_speaks(run: Run, planned: Planned) -> None:
    result = run("explain", planned[0], "model.layers.3.self_attn")
    assert result.exit_code == 0
    assert "placed column 2@tp*32" in words(result)
    assert "Hint: give the model" in result.stderr
    [head] = explained(run, planned[0], "lm_head.weight", None)
    assert (head["placement"], head["alternatives"]) == ("column 256@tp", [])


@pytest.mark.parametrize(
    ("name", "error", "code"),
    [
        ("model.layer", "no parameter or module of the model is named 'model.layer'", 2),
        ("model.rotary_emb", "'model.rotary_emb' has buffers only", 2),
    ],
)
def test_names_that_explain_nothing(
    run: Run, model: Path, planned: Planned, name: str, error: str, code: int
) -> None:
    result = run("explain", planned[0], name, model)
    assert (result.exit_code, result.stdout) == (code, "")
    assert error in result.stderr
    assert run("explain", planned[0], "nowhere").exit_code == 2


def test_another_model_is_not_explained(run: Run, planned: Planned, tmp_path: Path) -> None:
    tiny(hidden_size=128).save_pretrained(tmp_path)
    result = run("explain", planned[0], "lm_head", tmp_path)
    assert result.exit_code == 1
    assert "the plan is for another LlamaForCausalLM" in result.stderr


def test_a_layer_that_was_folded_into_another(run: Run, tmp_path: Path) -> None:
    """Of six layers the planner looks at one or two; any of them may be asked for."""
    tiny(num_hidden_layers=6).save_pretrained(tmp_path)
    path = tmp_path / "plan.json"
    assert run("plan", tmp_path, "--tp", 2, "-q", "-o", path).exit_code == 0
    [found] = explained(run, path, "model.layers.4.self_attn.k_proj", tmp_path)
    assert (found["name"], found["count"]) == ("model.layers.*.self_attn.k_proj.weight", 6)
    assert found["alternatives"][0]["bytes"] == 6 * 4 * 32 * 64 // 2


# --- diff


def test_equal_plans(run: Run, planned: Planned, damaged: Any) -> None:
    """Whoever found them."""
    other = damaged(versions={"torch": "0"})
    result = run("diff", planned[0], other)
    assert (result.exit_code, result.stdout) == (0, "The plans are equal.\n")
    result = run("diff", planned[0], other, "--json")
    assert (result.exit_code, result.stdout) == (0, '{"differences":[],"equal":true}\n')


def test_plans_that_differ(run: Run, model: Path, planned: Planned, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    run("plan", model, "--tp", 2, "--pin", "model.layers.*.mlp=replicate", "-q", "-o", path)
    result = run("diff", planned[0], path)
    assert result.exit_code == 1
    found = words(result)
    assert "memory per rank 209.3 KiB (50.2%) 305.3 KiB (73.2%)" in found
    assert "model.layers.*.mlp.up_proj.weight column 128@tp replicated" in found
    assert "model.layers.*.mlp.down_proj fwd all-reduce none" in found
    assert "model.layers.*.mlp none replicate" in found
    assert not [line for line in found if "self_attn" in line]
    data = json.loads(run("diff", planned[0], path, "--json").stdout)
    assert data["equal"] is False
    assert {
        "kind": "cost", "name": "memory per rank", "first": "209.3 KiB (50.2%)",
        "second": "305.3 KiB (73.2%)",
    } in data["differences"]  # fmt: skip


def test_layers_that_are_alike_in_one_plan_only(
    run: Run, model: Path, planned: Planned, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    pin = "model.layers.1.mlp.up_proj=replicate"
    run("plan", model, "--tp", 2, "--pin", pin, "-q", "-o", path)
    found = words(run("diff", planned[0], path))
    assert "model.layers.*.mlp.up_proj.weight column 128@tp differs by layer" in found
    assert not [line for line in found if line.startswith("model.layers.0.mlp.up_proj.weight")]
    back = words(run("diff", path, planned[0]))
    assert "model.layers.*.mlp.up_proj.weight differs by layer column 128@tp" in back


def test_a_diff_of_what_is_no_plan(run: Run, planned: Planned, tmp_path: Path) -> None:
    result = run("diff", planned[0], tmp_path / "none.json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot read plan" in result.stderr
