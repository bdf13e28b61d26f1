"""A file that a command reads, or writes already, is not written over."""

import shutil
from pathlib import Path

import pytest
from click.testing import Result

from tests.cli.conftest import Run


def refused(result: Result) -> None:
    assert result.exit_code == 2 and "this command also reads or writes" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_plans_stay(run: Run, planned: tuple[Path, Result], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    shutil.copyfile(planned[0], plan)
    (tmp_path / "link").symlink_to(plan)
    refused(run("show", plan, "--html", tmp_path / "link"))
    refused(run("show", planned[0], plan, "--html", plan))
    refused(run("export", plan, "--to", "csv", "-o", plan))
    assert plan.read_bytes() == planned[0].read_bytes()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_stays(run: Run, model: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / name).touch()
    before = (folder / name).read_bytes()
    refused(run("plan", folder, "--tp", 2, "-o", folder / name))
    assert (folder / name).read_bytes() == before
    (folder / "model.py").write_text("")
    refused(run("plan", f"{folder / 'model.py'}:make", "--tp", 2, "--html", folder / "model.py"))


def test_one_file_for_two_results(run: Run, model: Path, tmp_path: Path) -> None:
    refused(run("plan", model, "--tp", 2, "-o", tmp_path / "x", "--html", tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


def test_a_plan_may_lie_beside_its_model(run: Run, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    for _ in range(2):  # the second time it replaces the first
        done = run("plan", folder, "--tp", 2, "-o", folder / "plan.json", "--html", "/dev/null")
        assert done.exit_code == 0, done.stderr
