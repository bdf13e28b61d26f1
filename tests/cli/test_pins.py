"""Pins on the command line."""

from pathlib import Path

import shardwright
from tests.cli.conftest import Run

MLP = "model.layers.*.mlp"


def test_pins_of_flags_and_file_are_recorded_and_shown(
    run: Run, small: Path, tmp_path: Path
) -> None:
    pins, out = tmp_path / "pins.json", tmp_path / "plan.json"
    pins.write_text('{"lm_head.weight": "shard:0"}')
    result = run("plan", small, "--tp", 2, "--pin", f"{MLP}.*=replicate", "--pins", pins, "-o", out)
    assert result.exit_code == 0, result.stderr
    want = {"lm_head.weight": "shard:0", f"{MLP}.*": "replicate"}
    assert shardwright.Plan.load(out).pins == want
    assert "pins        lm_head.weight=shard:0\n              model.layers.*.mlp" in result.stdout


def test_a_refused_pin_is_one_line_on_stderr(run: Run, small: Path) -> None:
    result = run("plan", small, "--tp", 2, "--pin", "model.norm=shard:0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: model.norm.weight=shard:0 cannot hold; what forbids")
    assert result.stderr.count("\n") == 1
    assert run("plan", small, "--tp", 2, "--pin", "lm_head").exit_code == 2
