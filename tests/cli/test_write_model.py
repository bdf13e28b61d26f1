"""`plan --write-model`: the CP-SAT model as text, all of it or nothing."""

import json
import re
from pathlib import Path

import pytest
from ortools.sat.python import cp_model


@pytest.mark.parametrize("more", [(), ("--memory", "1GiB")])
def test_the_model_names_axes_and_has_the_plans_optimum(run, model: Path, tmp_path: Path, more):
    path, out = tmp_path / "model.txt", tmp_path / "plan.json"
    done = run("plan", model, "--tp", 2, "--write-model", path, "-o", out, *more)
    assert done.exit_code == 0, done.stderr
    text = path.read_text()
    names = re.findall(r'^ *name: "(.*)"$', text, re.MULTILINE)
    gate = "model.layers.0.mlp.gate_proj.weight[0]"
    assert gate in names and f"model.layers.0.mlp.up_proj.weight[0: {gate}]" in names
    assert any(name.endswith(" partial on tp") for name in names)
    found = cp_model.CpModel()
    assert found.proto.parse_text_format(text)
    assert cp_model.CpSolver().solve(found) == cp_model.OPTIMAL
    solver = json.loads(out.read_text())["solver"]
    assert (solver["found_by"], solver["proved_by"]) == ("backtracking", "cpsat")


def test_a_file_that_cannot_be_written_is_refused_at_once(run, model: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = run("plan", model, "--tp", 2, "--write-model", tmp_path / "file" / "model.txt")
    assert done.exit_code != 0 and "cannot write" in done.stderr


def test_no_model_without_a_solution(run, model: Path, tmp_path: Path):
    path = tmp_path / "model.txt"
    pins = ("--pin", "model.norm=replicate", "--memory", "1000")
    assert run("plan", model, "--tp", 2, "--write-model", path, *pins).exit_code != 0
    assert list(tmp_path.iterdir()) == [] or not path.exists()
