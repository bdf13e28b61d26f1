"""The command where things are not as usual: streams that are closed or full, homes, locales."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from shardwright.planner.contract.files import write_atomically
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.report.report import report
from shardwright.planner.report.tables import plain, show

COMMAND = [sys.executable, "-m", "shardwright"]


def call(
    *words: object,
    stdout: Any = subprocess.PIPE,
    stderr: Any = subprocess.PIPE,
    **environment: str,
) -> Any:
    """Run the command in a process of its own; `None` in the environment takes a variable away."""
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )


@pytest.mark.parametrize("words", [("show", "PLAN"), ("--help",), ("plan", "-h"), ("-V",), ()])
def test_a_full_disk_behind_stdout(planned: tuple[Path, Result], words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        found = call(*(planned[0] if word == "PLAN" else word for word in words), stdout=full)
    assert found.returncode == 1
    assert found.stderr == "Error: cannot read or write: No space left on device\n"


def test_a_full_disk_behind_stderr(planned: tuple[Path, Result]) -> None:
    """Results do not fail with a hint that cannot be printed, and errors keep their exit code."""
    for words, code in [(("explain", planned[0], "lm_head.weight"), 0), (("show", "none"), 1)]:
        with Path("/dev/full").open("w") as full:
            found = call(*words, stderr=full)
        assert found.returncode == code
        assert ("placed" in found.stdout) == (code == 0)


def test_a_full_disk_behind_the_output(planned: tuple[Path, Result], run: Any) -> None:
    """What is no file is written to, not replaced."""
    before = Path("/dev/full").stat().st_rdev
    result = run("export", planned[0], "--to", "csv", "-o", "/dev/full")
    assert result.exit_code == 2
    assert result.stderr == "Error: cannot write /dev/full: No space left on device\n"
    assert Path("/dev/full").stat().st_rdev == before


def test_stdout_that_is_closed(planned: tuple[Path, Result]) -> None:
    words = " ".join([*COMMAND, "show", str(planned[0]), ">&-"])
    found = subprocess.run(["sh", "-c", words], stderr=subprocess.PIPE, text=True, timeout=300)
    assert (found.returncode, found.stderr) == (0, "")


def test_a_reader_that_has_read_enough(planned: tuple[Path, Result]) -> None:
    words = " ".join([*COMMAND, "export", str(planned[0]), "--to", "csv", "|", "true"])
    found = subprocess.run(["sh", "-c", words], stderr=subprocess.PIPE, text=True, timeout=300)
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"COLUMNS": "20"},
        {"LANG": "C", "LC_ALL": "C"},
        {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        {"HOME": "/nowhere/at/all"},
        {"HOME": ""},
    ],
)
def test_other_surroundings(planned: tuple[Path, Result], environment: dict[str, str]) -> None:
    found = call("show", planned[0], **environment)
    assert found.returncode == 0, found.stderr
    assert "LlamaForCausalLM" in found.stdout and found.stderr == ""


def test_a_narrow_terminal_breaks_no_words(plan: Plan, monkeypatch: Any, capsys: Any) -> None:
    """It wraps lines itself, at any letter; cells are broken between words only."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    show(report(plan))
    assert set(plain(report(plan)).split()) == set(capsys.readouterr().out.split())


def test_names_that_are_empty(run: Any, model: Path) -> None:
    assert run("plan", "", "--tp", 2).stderr == (
        "Error: the model's name is empty: give a directory or a hub id\n"
    )
    assert run("plan", model, "--tp", 2, "-o", "").stderr == (
        "Error: the name of the file to write is empty\n"
    )


def test_a_home_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    """Planning needs nothing of it."""
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    found = call("plan", model, "--tp", 2, "--json", HOME=str(home), HF_HOME=str(home / "hf"))
    assert found.returncode == 0, found.stderr


def test_files_are_as_the_mask_says(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "mine", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("folder/file")
    write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "folder" / "file").read_text() == "text"
    assert (tmp_path / "link").is_symlink()


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    """It is what one of them wrote, and nothing else lies about."""
    path, texts = tmp_path / "plan.json", [c * 100_000 for c in "abcdefgh"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_atomically(path, text), texts * 4))
    assert path.read_text() in texts
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_nothing_that_others_wrote_steers_the_terminal(run: Any) -> None:
    result = run("show", "\x1b[31mred\x07.json")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: cannot read plan \\x1b[31mred\\x07.json: No such file or directory\n"
    )
