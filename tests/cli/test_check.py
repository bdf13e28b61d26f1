"""`shardwright check`: on meta, and with real ranks."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.written import dry_run_written, output_shapes, predict
from shardwright.planner.on_ranks.numeric import Difference, cut, differences
from shardwright.planner.trace.opaque import Opaque
from shardwright.planner.trace.source import read_source
from tests.cli.conftest import Run, tiny


def test_plan_holds_on_meta(run: Run, model: Path, planned: tuple[Path, Result]) -> None:
    result = run("check", planned[0], model)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("on meta: LlamaForCausalLM, ranks 0 and 1 of 2: ")
    assert result.stderr == ""


def test_as_json(run: Run, model: Path, planned: tuple[Path, Result]) -> None:
    found = json.loads(run("check", planned[0], model, "--json").stdout)
    assert found.pop("shapes") > 5
    assert found == {"ok": True, "ranks": [0, 1]}


def test_predicted_shapes_are_whole_logits_and_what_redistributions_lead_to(
    plan: Plan, model: Path
) -> None:
    source = read_source(model)
    whole = output_shapes(source, Opaque(source.module))
    found = predict(plan, whole, {"tp": (0, 2)})
    calls = 2  # without and with a mask for padding
    assert found[("", "logits")] == [(3, 19, 256)] * calls
    assert found[("lm_head", "")] == [(3, 19, 256)] * calls
    assert found[("model.layers.0.self_attn.o_proj", "")] == [(3, 19, 64)] * calls
    assert ("model.layers.0.self_attn.q_proj", "") not in found


def without(plan: Plan, module: str) -> Plan:
    modules = {name: spec for name, spec in plan.modules.items() if name != module}
    return plan.model_copy(update={"modules": modules})


def test_plan_that_forgets_a_module_does_not_hold(plan: Plan, model: Path) -> None:
    with pytest.raises(PlanError, match="the plan does not hold on rank 0 in 'model.layers.0"):
        dry_run_written(without(plan, "model.layers.*.self_attn.v_proj"), model)


def test_plan_that_leaves_logits_split_does_not_hold(plan: Plan, model: Path) -> None:
    head = plan.modules["lm_head"].model_copy(update={"outputs": []})
    broken = plan.model_copy(update={"modules": {**plan.modules, "lm_head": head}})
    text = r"output 'logits' has shape \[3, 19, 128\], not \[3, 19, 256\]; make it again"
    with pytest.raises(PlanError, match=text):
        dry_run_written(broken, model)


# --- with real ranks


def test_numeric_with_layers_planned_anew(
    run: Run, model: Path, planned: tuple[Path, Result]
) -> None:
    """Two processes over gloo."""
    result = run("check", planned[0], model, "--numeric", "--layers", 1, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["numeric"]
    assert (found["ranks"], found["layers"], found["dtype"]) == (2, 1, "float32")
    assert found["parameters"] == 12
    assert 0 < found["logits"] < 1e-5
    assert 0 < found["gradients"] < 1e-5


def test_difference_over_the_tolerance_fails(
    run: Run, model: Path, planned: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Difference(2, 2, "float32", 21, 1e-6, 3e-3, "lm_head.weight", 1e-4)
    monkeypatch.setattr("shardwright.planner.on_ranks.numeric.compare", lambda *_: found)
    result = run("check", planned[0], model, "--numeric")
    assert result.exit_code == 1
    assert "logits     differ by 1.00e-06 at most" in result.stdout
    assert "(worst: lm_head.weight)" in result.stdout
    assert result.stderr == (
        "Error: the split model differs from the whole one by more than 0.0001 (a ReLU whose input "
        "is 0 but for rounding may do that: --dtype float64 tells)\n"
    )


def test_not_a_number_is_not_within_the_tolerance() -> None:
    nan = float("nan")
    assert not Difference(2, 2, "float32", 21, nan, 0.0, "", 1e-4).ok
    assert not Difference(2, 2, "float32", 21, 0.0, nan, "", 1e-4).ok
    want = {"a": torch.ones(2), "b": torch.ones(2)}
    value, worst = differences({"a": torch.full((2,), 1.5), "b": torch.full((2,), nan)}, want)
    assert (value != value, worst) == (True, "b")


def test_gradient_that_is_zero_but_for_rounding_is_seen_beside_the_others() -> None:
    want = {"weight": torch.full((2,), 4.0), "key.bias": torch.full((2,), 1e-9)}
    got = {"weight": torch.full((2,), 4.0), "key.bias": torch.full((2,), -1e-9)}
    assert differences(got, want)[0] < 1e-6


def test_gradient_that_is_missing_is_a_difference() -> None:
    assert differences({}, {"weight": torch.ones(2)}) == (float("inf"), "weight")


def test_cut_config_has_fewer_layers_everywhere() -> None:
    config = tiny(num_hidden_layers=4)
    config.layer_types = ["a", "b", "c", "d"]  # type: ignore[attr-defined]
    found = cut(config, 2)
    assert (found.num_hidden_layers, found.layer_types) == (2, ["a", "b"])
    assert config.num_hidden_layers == 4
    with pytest.raises(UsageError, match="--layers must be between 1 and the model's 4, not 5"):
        cut(config, 5)


def test_cut_config_that_names_its_layers_otherwise() -> None:
    from transformers import GPT2Config

    assert cut(GPT2Config(n_layer=6), 3).n_layer == 3


@pytest.mark.parametrize("option", [["--layers", 1], ["--dtype", "float64"]])
def test_options_that_need_numeric(run: Run, option: list[object]) -> None:
    result = run("check", "plan.json", "model", *option)
    assert result.exit_code == 2
    assert "--layers and --dtype need --numeric" in result.stderr
