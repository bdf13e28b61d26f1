"""The command line: what goes where, and that two runs write the same bytes."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import Result

from shardwright.planner.cli.main import main
from shardwright.planner.contract.plan_file import Plan
from tests.cli.conftest import Run
from tests.planning import as_text

ROOT = Path(__file__).parent.parent.parent

OPTIONS = {
    "plan": "--batch --cache-dir --compare-tp-plan --continuous-batching --dequantize --device "
    "--dp --dtype --dump --expert-imbalance --gpus-per-host --help --hosts --html --inputs --json "
    "--local-files-only --memory --mesh "
    "--objective --optimizer-bytes --output --phase --pin --pins --pins-from-tp-plan --quiet "
    "--ranks --recompute --revision --seq --sequence-parallel --solver --speeds --subfolder "
    "--time-limit --tp --tp-plan --trust-remote-code --tune --write-model -h -o -q",
    "doctor": "--cache-dir --device --help --inputs --json --local-files-only --revision "
    "--subfolder --tp --trust-remote-code -h",
    "show": "--help --html --inputs --json --model --trust-remote-code -h",
    "explain": "--cache-dir --help --inputs --json --local-files-only --revision "
    "--subfolder --trust-remote-code -h",
    "diff": "--help --json -h",
    "export": "--cache-dir --help --local-files-only --output --own-styles --revision --to "
    "--trust-remote-code -h -o",
    "check": "--accept --cache-dir --dtype --help --inputs --json --layers --local-files-only "
    "--numeric --revision --subfolder --trust-remote-code -h",
    "audit": "--device --help --json --tp -h",
    "serve": "--cache-dir --cache-tokens --dtype --help --host --local-files-only --max-length "
    "--max-requests --name --plan --port --revision --timeout --tp --trust-remote-code -h",
    "calibrate": "--device --help --nccl-tests --output --quick -h -o",
    "schema": "--help -h",
}


# --- help


def test_commands_and_options_are_the_published_ones() -> None:
    """Adding one is a decision; taking one away breaks someone's script."""
    found = {}
    for name, command in main.commands.items():
        parameters = command.get_params(click.Context(command, parent=click.Context(main)))
        options = [o for p in parameters if isinstance(p, click.Option) for o in p.opts]
        found[name] = " ".join(sorted({*options, "-h"}))
    assert found == OPTIONS


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_no_arguments_print_the_help(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage:")
    assert (
        "Examples:\n    shardwright plan some-org/some-model --tp 4 -o plan.json" in result.stdout
    )


@pytest.mark.parametrize("command", sorted(main.commands))
def test_help_has_examples(run: Run, command: str) -> None:
    text = run(command, "--help").stdout
    assert f"shardwright {command}" in text.partition("Examples:\n")[2]
    assert max(map(len, text.splitlines())) <= 100


def test_unknown_option_suggests_the_known_one(run: Run) -> None:
    result = run("plan", "model", "--outptu", "plan.json")
    assert result.exit_code == 2
    assert "'--output'" in result.stderr


# --- plan and show


def test_show_prints_what_plan_printed(run: Run, planned: tuple[Path, Result]) -> None:
    path, first = planned
    shown = run("show", path)
    assert shown.exit_code == 0
    assert shown.stdout == first.stdout
    assert shown.stderr == ""


def test_report_has_no_colours_and_fits_100_columns(planned: tuple[Path, Result]) -> None:
    text = planned[1].stdout
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert text == as_text(Plan.load(planned[0]))


def test_report_says_what_is_split_how(planned: tuple[Path, Result]) -> None:
    words = [" ".join(line.split()) for line in planned[1].stdout.splitlines()]
    assert words[0] == "LlamaForCausalLM on 2 ranks (tp=2)"
    assert "priced for prefill, batch 1, seq 512, float32 on h100-nvlink" in words
    assert "PARAMETER SHAPE ON_RANK_0 SHARDING COLLECTIVE" in words
    assert "model.layers.*" in words
    assert "self_attn.q_proj.weight 64x64 32x64 column 2@tp*32" in words
    assert "self_attn.o_proj.weight 64x64 64x32 row 2@tp*32 fwd all-reduce" in words
    assert "lm_head.weight 256x64 128x64 column 256@tp fwd all-gather" in words
    assert any(w.startswith("solver proven optimal by cpsat (objective ") for w in words)


def test_hints_go_to_stderr(planned: tuple[Path, Result]) -> None:
    path, result = planned
    assert f"Wrote {path}" in result.stderr
    assert str(path) not in result.stdout


def test_nothing_else_is_said_on_stderr(planned: tuple[Path, Result]) -> None:
    assert len(planned[1].stderr.strip().splitlines()) == 1


def test_json_is_one_compact_line(run: Run, planned: tuple[Path, Result]) -> None:
    result = run("show", planned[0], "--json")
    assert result.stdout.count("\n") == 1
    assert ": " not in result.stdout.partition('"reason"')[0][:200]
    assert Plan.from_json(result.stdout) == Plan.load(planned[0])


def test_plan_as_json_and_other_choices(run: Run, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    result = run(
        "plan", small, "--tp", 2, "--json", "-o", path, "--memory", "1GiB", "--solver",
        "backtracking", "--batch", 4, "--seq", 128, "--dtype", "bfloat16", "--device", "cpu-gloo",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    found = Plan.from_json(result.stdout)
    assert found == Plan.load(path)
    load = found.workload
    assert (load.batch, load.seq, load.dtype, load.device) == (4, 128, "bfloat16", "cpu-gloo")
    assert found.solver.name == "backtracking"
    assert result.stdout.count("\n") == 1


def test_quiet_prints_the_path_alone(run: Run, small: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = run("plan", small, "--tp", 2, "-q", "-o", path)
    assert (result.stdout, result.stderr) == (f"{path}\n", "")
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path], "a temporary file is left"


def test_json_and_quiet_exclude_each_other(run: Run, small: Path) -> None:
    result = run("plan", small, "--tp", 2, "--json", "-q")
    assert result.exit_code == 2
    assert "--json and --quiet exclude each other" in result.stderr


@pytest.mark.parametrize("value", ["much", "24XiB", "-1GiB", "0", ""])
def test_memory_that_cannot_be_meant(run: Run, value: str) -> None:
    result = run("plan", "nowhere", "--tp", 2, f"--memory={value}")
    assert result.exit_code == 2
    assert f"'{value}' is not a size: write it as 24GiB, 24GB, 500MB or plain" in result.stderr


# --- terminals


@pytest.mark.parametrize("no_color, coloured", [(None, True), ("1", False)])
def test_colours_on_a_terminal_alone(
    planned: tuple[Path, Result], no_color: str | None, coloured: bool
) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT / "src")}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        env.pop(name, None)
    if no_color:
        env["NO_COLOR"] = no_color
    command = [sys.executable, "-m", "shardwright", "show", planned[0]]
    with subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs) as process:
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            while part := os.read(ours, 65536):
                text += part
        os.close(ours)
    assert process.returncode == 0
    assert (b"\x1b[36m" in text or b"\x1b[1;36m" in text) == coloured
    assert b"model.layers.*" in text


# --- files


def test_failing_write_leaves_no_file(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        plan.save(path)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_file_that_cannot_be_written(run: Run, small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("plan", small, "--tp", 2, "-o", tmp_path / "file" / "plan.json")
    assert result.exit_code == 2
    assert result.stderr == (
        f"Error: cannot write {tmp_path}/file/plan.json: "
        f"{tmp_path}/file is not a directory one can write to\n"
    )


def test_schema_describes_a_plan(run: Run, planned: tuple[Path, Result]) -> None:
    schema = json.loads(run("schema").stdout)
    assert schema["additionalProperties"] is False
    keys = json.loads(planned[0].read_text()).keys()
    assert keys <= schema["properties"].keys()
    assert schema["properties"]["version"]["const"] == 4
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
