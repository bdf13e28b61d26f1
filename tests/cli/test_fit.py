"""Plans that do not fit their device, more ranks than heads, folded tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import Result

from shardwright.planner.cli.console import as_options
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.devices import device
from shardwright.planner.report import fit, tables
from shardwright.planner.report.diff import Difference, diff_report, differences
from shardwright.planner.wording import ranges
from tests.cli.conftest import Run
from tests.planning import as_text


def test_a_plan_that_does_not_fit_is_written_and_refused(
    run: Run, model: Path, tmp_path: Path
) -> None:
    profile = json.loads((device.FOLDER / "cpu-gloo.json").read_text())
    small, out = tmp_path / "small.json", tmp_path / "plan.json"
    small.write_text(json.dumps({**profile, "memory_bytes": 900_000}))
    result = run("plan", model, "--tp", 2, "--device", small, "--objective", "time", "-o", out)
    assert result.exit_code == 1
    assert "Error: the plan does not fit: a rank holds " in result.stderr
    assert "DOES NOT FIT the 878.9 KiB of a rank" in result.stdout
    assert "for least memory: proven optimal" in " ".join(result.stdout.split())
    assert not fit.fits(Plan.load(out))


def test_how_many_ranks_would_fit(plan: Plan) -> None:
    """What is sharded shrinks with them; with what is left no number of ranks may do."""
    held = fit.memory_of(plan)
    part, whole = max(plan.predicted.parameter_bytes), plan.predicted.unsharded_bytes
    replicated = 2 * part - whole
    rest = held.total - held.parameters

    def limited(room: int) -> Plan:
        objective = plan.objective.model_copy(update={"memory_bytes": room})
        return plan.model_copy(update={"objective": objective})

    assert fit.misfit(limited(held.total)) is None
    eighth = limited(rest + replicated + (whole - replicated) // 8 + 1)
    assert "about 8 ranks would fit (an estimate): --tp 8" in (fit.misfit(eighth) or "")
    none = limited(rest + replicated - 1)
    assert "use a larger device" in (fit.misfit(none) or "")


def test_more_ranks_than_heads(run: Run, small: Path) -> None:
    result = run("plan", small, "--tp", 8)
    assert result.exit_code == 0
    assert "Warning: 8 ranks, and the model has 4 attention heads: " in result.stderr


def test_quiet_needs_a_file(run: Run) -> None:
    result = run("plan", "nowhere", "--tp", 2, "-q")
    assert result.exit_code == 2 and "give --output or --html" in result.stderr


def test_a_folder_that_is_made_is_named(run: Run, small: Path, tmp_path: Path) -> None:
    result = run("plan", small, "--tp", 2, "-q", "-o", tmp_path / "new" / "plan.json")
    assert result.exit_code == 0 and f"Made the folder {tmp_path / 'new'}" in result.stderr
    again = run("plan", small, "--tp", 2, "-q", "-o", tmp_path / "new" / "plan.json")
    assert "Made the folder" not in again.stderr


def test_equal_layers_are_one_row(planned: tuple[Path, Result]) -> None:
    """Named one by one in a plan, as where other layers of the stack have something else."""
    found = Plan.load(planned[0])
    spec = found.modules["model.layers.*.mlp.down_proj"]
    layers = {f"model.layers.{n}.mlp.down_proj": spec for n in (3, 4, 5, 7)}
    text = as_text(found.model_copy(update={"modules": layers}))
    assert "model.layers.3-5, 7 (4 layers)" in text
    assert text.count("mlp.down_proj.weight") == 1
    assert ranges([2, 1, 9]) == "1-2, 9"


def test_names_are_not_broken(planned: tuple[Path, Result]) -> None:
    found = Plan.load(planned[0])
    name = "a_module_with_a_long_name." * 5 + "down_proj"
    spec = found.modules["model.layers.*.mlp.down_proj"]
    assert f"{name}.weight" in as_text(found.model_copy(update={"modules": {name: spec}}))


def test_parameters_of_another_model_are_absent(plan: Plan) -> None:
    spec: Any = plan.modules["lm_head"]
    more = plan.model_copy(update={"modules": {**plan.modules, "score": spec}})
    rows = [(d.name, d.first, d.second) for d in differences(plan, more) if d.kind == "placement"]
    assert rows == [("score.weight", "absent", "column 256@tp")]


def test_names_of_a_diff_are_not_broken(plan: Plan) -> None:
    """Of a class, of a parameter, and a long reason beside them."""
    longer = plan.model.model_copy(update={"architecture": "ALongNameForConditionalGeneration"})
    name = "a_module_with_a_long_name.down_proj"
    modules = {**plan.modules, name: plan.modules["lm_head"]}
    other = plan.model_copy(update={"model": longer, "modules": modules})
    found = [*differences(plan, other), Difference("replicated", name, "none", "a reason " * 20)]
    lines = tables.plain(diff_report(found, "a", "b")).splitlines()
    assert any(line.endswith(longer.architecture) for line in lines)
    assert any(line.startswith(f"  {name}.weight  ") for line in lines)
    assert max(map(len, lines)) < 130


def test_advice_names_the_option() -> None:
    text = "do not know the inputs of X: give example args or kwargs (batch 3 is a good size)"
    assert as_options(text) == (
        "do not know the inputs of X: give example inputs with --inputs FILE.py:FUNCTION "
        "(batch 3 is a good size)"
    )


def test_a_mesh_is_chosen_for_hosts(run: Run, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    hosts = ("--hosts", 2, "--gpus-per-host", 2, "--batch", 2, "--phase", "decode")
    result = run("plan", small, *hosts, "-o", out)
    assert result.exit_code == 0
    assert "the plan" in result.stdout and "TOKENS/S/USER" in result.stdout
    assert "torchrun --nproc-per-node 2 --nnodes 2" in result.stdout
    plan = Plan.load(out)
    assert [{**choice.mesh} for choice in plan.meshes[:1]] == [plan.mesh]
    assert {choice.mesh["tp"] for choice in plan.meshes} == {2, 4}  # a batch of 2 has no 4 copies
    assert run("check", out, small).exit_code == 0


def test_what_no_mesh_can_be_chosen_for(run: Run, small: Path) -> None:
    for asked, message in (
        (("--ranks", 4, "--tp", 2), "give one of --tp"),
        ((), "give one of --tp"),
        (("--ranks", 4, "--gpus-per-host", 2), "--ranks are all on one host"),
        (("--hosts", 2, "--device", "cpu-gloo"), "give --gpus-per-host"),
        (("--hosts", 2, "--gpus-per-host", 2, "--device", "cpu-gloo"), "no links between hosts"),
    ):
        result = run("plan", small, *asked)
        assert result.exit_code == 2 and message in result.stderr, asked
