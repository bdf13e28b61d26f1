"""Each error that a user can meet, by its text; on the command line always one line on stderr."""

import json
import multiprocessing
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM

import shardwright
from shardwright import (
    CheckpointError,
    DistributedError,
    ModelError,
    PlanError,
    UsageError,
)
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.on_ranks import launch
from shardwright.planner.on_ranks.launch import run_processes
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.cli import dying
from tests.cli.conftest import Run, tiny
from tests.ranks import run_ranks

Damage = Callable[..., Path]


def error_line(result: Result, code: int = 1) -> str:
    """The one line of an error, without its start."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("Error: ").rstrip("\n")


# --- the model


def test_not_a_model_directory(run: Run, tmp_path: Path) -> None:
    assert error_line(run("plan", tmp_path, "--tp", 2)) == (
        f"{tmp_path} is not a model directory: it has no config.json"
    )


def test_directory_that_does_not_exist(run: Run) -> None:
    assert error_line(run("plan", "./no/where", "--tp", 2)) == (
        "./no/where does not exist: give a directory with a config.json, or a hub id"
    )


def test_config_that_is_not_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert error_line(run("plan", tmp_path, "--tp", 2)) == (
        f"{tmp_path}/config.json is damaged: it does not hold a JSON object"
    )


def test_config_that_contradicts_itself(run: Run, model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 5}))
    assert error_line(run("plan", tmp_path, "--tp", 2)) == (
        f"the config of {tmp_path} is not valid: The hidden size (64) is not a multiple of the "
        "number of attention heads (5)."
    )


def test_architecture_unknown_to_transformers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "brandnew", "hidden_size": 4}')
    assert error_line(run("plan", tmp_path, "--tp", 2)) == (
        f"transformers does not know the architecture 'brandnew' of {tmp_path}: upgrade it, or "
        "build the module yourself and plan that"
    )


def test_module_whose_inputs_are_not_known() -> None:
    text = "^do not know the inputs of Linear, whose forward needs input: give example args"
    with pytest.raises(ModelError, match=text):
        shardwright.plan(torch.nn.Linear(4, 4), 2)


# --- the plan


def test_plan_that_is_not_there(run: Run) -> None:
    assert (
        error_line(run("show", "no.json")) == "cannot read plan no.json: No such file or directory"
    )


def test_plan_that_is_not_json(run: Run, planned: tuple[Path, Result], tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    path.write_text(planned[0].read_text()[:-100])
    assert error_line(run("show", path)).startswith(f"{path} is not JSON: ")


def test_json_that_is_not_a_plan(run: Run, model: Path) -> None:
    path = model / "config.json"
    assert error_line(run("show", path)) == (
        f'{path} is not a Shardwright plan: "format" should be "shardwright.plan"'
    )


def test_plan_of_another_version(run: Run, damaged: Damage) -> None:
    path = damaged(version=5)
    assert error_line(run("show", path)) == (
        f"{path} has plan version 5; this Shardwright reads versions 1 to 4: make the plan "
        "again with `shardwright plan`"
    )


def test_unknown_key_in_a_plan(run: Run, damaged: Damage) -> None:
    path = damaged(sharding="yes")
    assert error_line(run("show", path)) == (
        f"{path} is not valid: sharding: Extra inputs are not permitted"
    )


def test_plan_of_another_architecture(plan: Plan) -> None:
    text = "^the plan is for a LlamaForCausalLM, not a Linear: make a plan for this model$"
    with pytest.raises(PlanError, match=text):
        shardwright.apply(torch.nn.Linear(4, 4), plan, Mesh.shape_only({"tp": (0, 2)}))  # type: ignore[arg-type]


def test_plan_of_another_size(run: Run, planned: tuple[Path, Result], tmp_path: Path) -> None:
    tiny(intermediate_size=96).save_pretrained(tmp_path)
    assert re.fullmatch(
        r"the plan is for another LlamaForCausalLM: there 'model\.layers\.0\.mlp\.\w+\.weight' has "
        r"shape \[\d+, \d+\], here \[\d+, \d+\]",
        error_line(run("check", planned[0], tmp_path)),
    )


def test_plan_of_another_config(run: Run, planned: tuple[Path, Result], tmp_path: Path) -> None:
    tiny(hidden_act="gelu").save_pretrained(tmp_path)
    assert error_line(run("check", planned[0], tmp_path)) == (
        "the plan is for a LlamaForCausalLM with another config: make a plan for this one"
    )


def test_mesh_of_another_size(plan: Plan) -> None:
    text = "^the plan is for 2 ranks on mesh dim 'tp', the mesh has 3$"
    with pytest.raises(PlanError, match=text):
        shardwright.apply(torch.nn.Linear(4, 4), plan, Mesh.shape_only({"tp": (0, 3)}))  # type: ignore[arg-type]


# --- what is asked for


def test_unknown_solver(run: Run, model: Path) -> None:
    assert error_line(run("plan", model, "--tp", 2, "--solver", "magic"), 2) == (
        "unknown solver 'magic'; installed: backtracking, cpsat"
    )


def test_unknown_device(run: Run, model: Path) -> None:
    line = error_line(run("plan", model, "--tp", 2, "--device", "abacus"), 2)
    assert line.startswith("unknown device 'abacus'; known: ") and "h100-nvlink" in line
    line = error_line(run("plan", model, "--tp", 2, "--device", "none.json"), 2)
    assert line == "cannot read device profile none.json: No such file or directory"


def test_no_ranks() -> None:
    with pytest.raises(UsageError, match="^tp must be at least 1, not 0$"):
        shardwright.plan("nowhere", 0)


@pytest.mark.parametrize("arguments", [[], ["--no-sequence-parallel"]])
def test_infeasible_budget_says_the_least_that_would_fit(
    run: Run, model: Path, arguments: list[str]
) -> None:
    line = error_line(run("plan", model, "--tp", 2, "--memory", "100kB", *arguments))
    found = re.fullmatch(
        r"no plan fits 100,000 bytes a rank: the least found that would fit is ([\d,]+) bytes: "
        r"parameters 209.3 KiB \(lm_head.weight 32.0 KiB \(split\), model.embed_tokens.weight "
        r"32.0 KiB \(split\), model.layers.\*.mlp.down_proj.weight 32.0 KiB \(split\)\), "
        r"KV cache [\d.]+ KiB, activations [\d.]+ KiB",
        line,
    )
    assert found, line
    least = int(found[1].replace(",", ""))
    held = planning.plan(model, 2, memory=least).predicted.memory
    assert held is not None and 200_000 < held.parameters < 250_000
    assert held.total == least


# --- weights


@pytest.fixture(scope="session")
def weights(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights") / "tiny"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny()).save_pretrained(directory)
    return directory


@pytest.fixture
def copied(weights: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(weights, tmp_path / "copy"))


def load_on_two(directory: Path, plan: Plan) -> None:
    run_ranks(2, lambda _: shardwright.load(directory, plan))


def test_checkpoint_loads_before_it_is_damaged(copied: Path, plan: Plan) -> None:
    load_on_two(copied, plan)


def test_truncated_safetensors(copied: Path, plan: Plan) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    size = file.stat().st_size
    text = f"^{file} is truncated: it has {size} bytes and its header describes {size + 1000}: "
    with pytest.raises(CheckpointError, match=f"{text}fetch it again$"):
        load_on_two(copied, plan)


def test_corrupt_safetensors(copied: Path, plan: Plan) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(b"\xff" * 4096)
    text = rf"^{file} has a corrupt header \(.*\): fetch the file again$"
    with pytest.raises(CheckpointError, match=text):
        load_on_two(copied, plan)


def test_missing_key(copied: Path, plan: Plan) -> None:
    from safetensors.torch import load_file, save_file

    file = copied / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load_on_two(copied, plan)


def test_no_weights(model: Path, plan: Plan) -> None:
    with pytest.raises(CheckpointError, match=f"^{model} "):
        load_on_two(model, plan)


# --- ranks


def test_single_process_without_torchrun(
    model: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    text = (
        "^the plan needs 2 ranks and this is a single process: "
        r"start it with `torchrun --nproc-per-node 2 \.\.\.`$"
    )
    with pytest.raises(DistributedError, match=text):
        shardwright.load(model, plan)


def test_two_processes_for_a_plan_for_three(model: Path, plan: Plan) -> None:
    three = plan.model_copy(update={"mesh": {"tp": 3}}).sealed()
    found = run_processes(2, dying.load_with_too_few, model, three)
    text = "the plan is for 3 ranks, but 2 are running: start 3, or plan with --tp 2"
    assert [(rank, words) for rank, words, _ in found] == [(0, text), (1, text)]
    assert len(found[1][2]) == 2**20, "more than a pipe holds"


def test_rank_that_dies_in_forward_ends_the_rest(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(DistributedError, match=r"^rank 1 died \(exit code 3\)$"):
        run_processes(2, dying.die_in_forward, plan, tiny(), tmp_path)
    seconds, _, text = (tmp_path / "rank-0").read_text().partition(" ")
    assert float(seconds) < 10
    assert text.startswith(
        "all_reduce failed on rank 0: no answer from rank 1, which died or hangs ("
    )
    assert text.endswith("): look at the output of rank 1")


def test_rank_that_is_killed() -> None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    process.kill()
    process.join()
    assert launch.end_in_words(process) == "SIGKILL, out of memory?"


def test_error_of_one_rank_comes_before_what_it_led_to() -> None:
    with pytest.raises(PlanError, match="^rank 1 does not like the plan$"):
        run_processes(2, dying.raise_at_once)


def test_code_of_a_checkpoint_is_never_run(run: Run, tmp_path: Path) -> None:
    """Nor does anyone ask on the terminal whether to: `auto_map` is refused."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "code.OwnConfig"}})
    )
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "comes with code of its own" in error_line(run("plan", tmp_path, "--tp", 2))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "words, text",
    [
        (["plan"], "Missing argument 'MODEL' (see 'shardwright plan --help')"),
        (["bogus"], "No such command 'bogus' (see 'shardwright --help')"),
        (["diff", "a.json"], "Missing argument 'B.JSON' (see 'shardwright diff --help')"),
        (
            ["calibrate", "--nope"],
            "No such option '--nope' (see 'shardwright calibrate --help')",
        ),
        (
            ["plan", "x", "--tp", "z"],
            "Invalid value for '--tp': 'z' is not a valid integer range "
            "(see 'shardwright plan --help')",
        ),
        (
            ["plan", "x", "--tp", 2, "--json", "--quiet"],
            "--json and --quiet exclude each other (see 'shardwright plan --help')",
        ),
    ],
)
def test_a_wrong_command_line(run: Run, words: list[object], text: str) -> None:
    assert error_line(run(*words), code=2) == text


def test_serving_without_a_tokenizer(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said before a plan is made."""
    monkeypatch.setattr(shardwright, "plan", None)
    assert error_line(run("serve", model, "--tp", 2), code=2) == (
        f"{model} has no tokenizer that transformers can read: save a fast one (tokenizer.json) "
        "with the model"
    )
    assert "cannot find the config of ./nowhere" in error_line(run("serve", "./nowhere", "--tp", 2))
