"""`shardwright check`: on meta, and with real ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.on_ranks.numeric import Difference, cut, differences
from shardwright.planner.prove.compare import ACCEPTED
from tests.cli.conftest import Run, tiny


def test_plan_holds(run: Run, model: Path, planned: tuple[Path, Result]) -> None:
    result = run("check", planned[0], model)
    assert result.exit_code == 0, result.stderr
    rules, meta = result.stdout.splitlines()
    assert rules.startswith("by the rules: ") and rules.endswith("values and gradients")
    assert meta.startswith("on meta: LlamaForCausalLM, ranks 0 and 1 of 2: ")
    assert result.stderr == ""


def test_as_json(run: Run, model: Path, planned: tuple[Path, Result]) -> None:
    found = json.loads(run("check", planned[0], model, "--json").stdout)
    assert all(found.pop(count) > 5 for count in ("shapes", "ops", "changes"))
    assert found == {"ok": True, "ranks": [0, 1]}


# --- edits


def edited(planned: tuple[Path, Result], to: Path, module: str, **keys: Any) -> Path:
    """A copy of the plan file with some keys of a module changed; its digest is left as it is."""
    data = json.loads(planned[0].read_text())
    if keys:
        data["modules"][module] |= keys
    else:
        del data["modules"][module]
    to.write_text(json.dumps(data))
    return to


def test_an_edit_is_noticed_and_says_what_to_do(
    run: Run, model: Path, planned: tuple[Path, Result], tmp_path: Path
) -> None:
    file = edited(planned, tmp_path / "p.json", "model.layers.*.mlp.down_proj", outputs=[])
    result = run("check", file, model)
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: {file} was edited since it was written: `shardwright check --accept PLAN.JSON "
        "MODEL` proves that it is right for the model, and writes its digest\n"
    )


def test_an_edit_that_computes_something_else_is_not_accepted(
    run: Run, model: Path, planned: tuple[Path, Result], tmp_path: Path
) -> None:
    """The output of a row-parallel layer that nobody sums: shapes are right, numbers are not."""
    file = edited(planned, tmp_path / "p.json", "model.layers.*.mlp.down_proj", outputs=[])
    before = file.read_bytes()
    result = run("check", "--accept", file, model)
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "Error: the plan does not hold: these contradict each other: a hidden state between blocks "
        "must be replicated; linear in 'model.layers.0.mlp.down_proj' (modeling_llama.py:"
    )
    assert "what the plan says of the output of 'model.layers.0.mlp.down_proj'" in result.stderr
    assert file.read_bytes() == before


def test_gradients_that_would_not_be_summed_are_not_accepted(
    run: Run, model: Path, planned: tuple[Path, Result], tmp_path: Path
) -> None:
    """Values are right without, and so are all shapes."""
    norm = "model.layers.*.post_attention_layernorm"
    outputs = json.loads(planned[0].read_text())["modules"][norm]["outputs"]
    assert outputs[0]["target"].endswith("| grad-partial tp")
    file = edited(planned, tmp_path / "p.json", norm, outputs=[])
    result = run("check", "--accept", file, model)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the plan does not hold: these contradict each other: " in result.stderr


def test_an_edit_that_is_right_is_accepted_with_its_own_figures(
    run: Run, model: Path, planned: tuple[Path, Result], tmp_path: Path
) -> None:
    """A head that is used whole: what it takes is worked out again, and no solver chose it."""
    data = json.loads(planned[0].read_text())
    before = data["predicted"]["parameter_bytes"]
    del data["modules"]["lm_head"]
    file = tmp_path / "p.json"
    file.write_text(json.dumps(data))
    result = run("check", "--accept", file, model)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"accepted: {file}"
    found = Plan.load(file).unedited()
    half = 256 * 64 // 2 * 4
    assert found.predicted.parameter_bytes == [n + half for n in before]
    assert (found.solver.status, found.solver.note) == ("feasible", ACCEPTED)
    assert run("check", file, model).exit_code == 0
    assert run("check", "--accept", file, model).stdout.splitlines()[-1] == f"unchanged: {file}"


@pytest.mark.parametrize("version", [1, 2])
def test_a_plan_of_an_older_release_is_accepted_once_it_was_proven(
    run: Run, model: Path, planned: tuple[Path, Result], tmp_path: Path, version: int
) -> None:
    """It has no digest, and says neither what a byte counted as nor what other calls need."""
    data = json.loads(planned[0].read_text())
    del data["digest"], data["calls"]
    for name, module in [*data["modules"].items()]:
        del module["takes"], module["gives"]
        if not (module["parameters"] or module["inputs"] or module["outputs"]):
            del data["modules"][name]  # it changes nothing
    assert "model" not in data["modules"]
    if version == 1:
        data["sub_dims"], data["whole"] = data.pop("sub_axes"), data.pop("replicated")
        data["predicted"]["whole_bytes"] = data["predicted"].pop("unsharded_bytes")
    file = tmp_path / "p.json"
    file.write_text(json.dumps({**data, "version": version}))
    result = run("check", file, model)
    assert result.exit_code == 1 and f"{file} carries no digest: `shardwright" in result.stderr
    assert run("check", "--accept", file, model).exit_code == 0
    was, now = (json.loads(path.read_text()) for path in (planned[0], file))
    assert {key for key in was | now if was[key] != now[key]} == {"digest", "objective"}


def test_figures_that_are_not_what_comes_out_are_named(
    run: Run, model: Path, plan: Plan, tmp_path: Path
) -> None:
    figures = plan.predicted.model_copy(update={"time_ns": 1})
    file = tmp_path / "p.json"
    plan.model_copy(update={"predicted": figures}).sealed().save(file)
    result = run("check", file, model)
    assert result.exit_code == 1
    assert "the plan does not hold: predicted.time_ns is 1, and should be " in result.stderr
    assert "made with --inputs is checked with the same" in result.stderr
    assert run("check", "--accept", file, model).exit_code == 0
    assert Plan.load(file) == plan


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
    monkeypatch.setattr("shardwright.planner.on_ranks.numeric.compare", lambda *_, **__: found)
    result = run("check", planned[0], model, "--numeric")
    assert result.exit_code == 1
    assert "logits     differ by 1.00e-06 at most" in result.stdout
    assert "(worst: lm_head.weight)" in result.stdout
    assert result.stderr == (
        "Error: the split model differs from the unsplit one by more than 0.0001 (this may be "
        "rounding at a ReLU whose input is near 0: try --dtype float64)\n"
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


def test_cut_config_shares_fewer_caches() -> None:
    from transformers import Gemma3nTextConfig

    config = Gemma3nTextConfig(num_hidden_layers=35, num_kv_shared_layers=15)
    assert [cut(config, n).num_kv_shared_layers for n in (4, 14, 20)] == [1, 6, 15]


@pytest.mark.parametrize("option", [["--layers", 1], ["--dtype", "float64"]])
def test_options_that_need_numeric(run: Run, option: list[object]) -> None:
    result = run("check", "plan.json", "model", *option)
    assert result.exit_code == 2
    assert "--layers and --dtype need --numeric" in result.stderr
