"""`export`: the formats that come with it, where they go, and what is refused in one line."""

import csv
import io
import resource
from math import prod
from pathlib import Path

import pytest
from click.testing import Result

import shardwright
from shardwright.errors import PluginError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports import exports
from shardwright.planner.exports.parameter_table import Row, rows
from tests.cli.conftest import Run

MLP = "model.layers.*.mlp"
DOWN = Row(
    f"{MLP}.down_proj.weight", "64x128", "64, 128@tp", "row 128@tp", 8192, 4096, "fwd all-reduce"
)


def test_csv_holds_every_parameter(run: Run, planned: tuple[Path, Result]) -> None:
    result = run("export", planned[0], "--to", "csv")
    table = list(csv.DictReader(io.StringIO(result.stdout)))
    assert result.stderr == "" and tuple(table[0]) == Row._fields
    plan = Plan.load(planned[0])
    shapes = {row["name"]: row["shape"] for row in table if row["shape"]}
    assert shapes == {n: "x".join(map(str, s)) for n, s in plan.model.parameters.items()}
    (down,) = [row for row in table if row["name"] == DOWN.name]
    assert down == {key: str(value) for key, value in DOWN._asdict().items()}


def test_elements_add_up_to_what_a_rank_holds(plan: Plan) -> None:
    """Two layers stand behind each `*`; all is float32, and the buffers are on every rank."""
    held = sum(
        int(row.elements_on_fullest_rank) * (2 if "*" in row.name else 1)
        for row in rows(plan)
        if row.elements
    )
    whole = sum(
        prod(shape) * (2 if "*" in name else 1) for name, shape in plan.model.parameters.items()
    )
    buffers = plan.predicted.unsharded_bytes - 4 * whole
    assert 0 <= buffers < 100
    assert max(plan.predicted.parameter_bytes) == 4 * held + buffers


def test_modules_without_parameters_have_a_row_where_they_send(plan: Plan) -> None:
    senders = [row for row in rows(plan) if not row.shape]
    assert senders and all(row.module_collectives for row in senders)
    assert [row.name for row in rows(plan)] == sorted(row.name for row in rows(plan))


def test_markdown(run: Run, planned: tuple[Path, Result]) -> None:
    lines = run("export", planned[0], "--to", "markdown").stdout.splitlines()
    assert lines[0].startswith("| name | shape | placement | split | elements |")
    assert lines[1] == "|" + " --- |" * len(Row._fields)
    assert "| " + " | ".join(map(str, DOWN)) + " |" in lines


def test_to_a_file(run: Run, planned: tuple[Path, Result], tmp_path: Path) -> None:
    out = tmp_path / "plan.csv"
    result = run("export", planned[0], "--to", "csv", "-o", out)
    assert (result.stdout, result.stderr) == ("", f"Wrote {out}\n")
    assert out.read_text() == shardwright.export(planned[0], "csv")
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan.json", "--to", "abacus"], "unknown format 'abacus'; installed: csv, markdown, "),
        (["nowhere.json", "--to", "csv"], "cannot read plan nowhere.json: No such file or"),
        (["plan.json", "--to", "csv", "-o", "/proc/x/plan.csv"], "cannot write /proc/x/plan.csv"),
    ],
)
def test_what_is_refused(run: Run, planned, monkeypatch, arguments: list, message: str) -> None:
    monkeypatch.chdir(planned[0].parent)
    result = run("export", *arguments)
    assert result.exit_code and result.stderr.startswith(f"Error: {message}")
    assert result.stderr.count("\n") == 1


def test_bytes_go_out_as_they_are(run: Run, planned, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(exports, "emitter", lambda name: lambda plan: b"\x00\xff\n")
    assert run("export", planned[0], "--to", "bytes").stdout_bytes == b"\x00\xff\n"
    run("export", planned[0], "--to", "bytes", "-o", tmp_path / "plan.bin")
    assert (tmp_path / "plan.bin").read_bytes() == b"\x00\xff\n"


def test_an_emitter_that_gives_something_else(plan: Plan, monkeypatch) -> None:
    monkeypatch.setattr(exports, "emitter", lambda name: lambda plan: {})
    with pytest.raises(PluginError, match="format 'x' gives a dict, not text or bytes"):
        shardwright.export(plan, "x")


def test_no_room_for_the_model_that_is_tried(
    run: Run, model: Path, planned: tuple[Path, Result]
) -> None:
    """As on a full disk. One line, without a traceback of safetensors."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        result = run("export", planned[0], model, "--to", "torch")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("Error: cannot read or write: ")
    assert "File too large" in result.stderr
