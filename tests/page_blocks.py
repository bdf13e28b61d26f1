"""Commands of documents, run in this process, and ranks as its forks: imports are paid for once."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shlex
import sys
from pathlib import Path

from click.testing import CliRunner

from benchmarks.forked import agent_store, run_forked
from shardwright.planner.cli.main import main


def output(command: str, folder: Path) -> str:
    """What a command prints: to stdout, or else to stderr; one rank after the other."""
    words = shlex.split(command)
    if words[0] == "cat":
        return Path(words[1]).read_text()
    if words[0] == "shardwright":
        return _ours(words[1:])
    if words[0] == "python":
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            _script(words[1], words[2:])
        return out.getvalue()
    if words[:2] == ["torchrun", "--nproc-per-node"]:
        return _ranks(int(words[2]), words[3:], folder)
    raise AssertionError(f"no block should run {words[0]}")


def _ours(words: list[str]) -> str:
    result = CliRunner().invoke(main, words, prog_name="shardwright", catch_exceptions=False)
    return result.stdout or result.stderr


def _script(file: str, words: list[str]) -> None:
    before, sys.argv = sys.argv, [file, *words]
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        sys.argv = before


def _ranks(ranks: int, words: list[str], folder: Path) -> str:
    logs = folder / ".ranks"
    logs.mkdir(exist_ok=True)
    ended = run_forked(ranks, rank, [str(Path.cwd()), words], logs, agent=agent_store())
    for one in ended:
        assert one.how == "well", f"{one.how}: {one.text}\n{one.log}"
    return "".join(one.log for one in ended)


def rank(folder: str, words: list[str]) -> None:
    """What a rank runs."""
    os.chdir(folder)
    _script(words[0], words[1:])
