"""Ranks that are started from a script: they run it only if something in it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

START = """
from shardwright.planner.on_ranks.launch import run_processes

class Own:
    pass

print("ran")
print(run_processes(2, {}))
"""


AGAIN = """
import sys
import shardwright
shardwright.plan
for name in [name for name in sys.modules if name.startswith("shardwright")]:
    del sys.modules[name]
import shardwright
shardwright.plan
"""


def run(folder: Path, call: str) -> Any:
    (folder / "script.py").write_text(START.format(call))
    command = [sys.executable, str(folder / "script.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    found = run(tmp_path, "abs, -3")
    assert (found.stdout, found.returncode) == ("ran\n[3, 3]\n", 0), found.stderr


def test_a_script_whose_classes_are_needed_is_told_of_the_guard(tmp_path: Path) -> None:
    found = run(tmp_path, "isinstance, Own(), object")
    assert found.returncode == 1
    assert 'put what it does under `if __name__ == "__main__":`' in found.stderr
    assert "bootstrapping" not in found.stderr


def test_a_second_import_says_what_to_do() -> None:
    found = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=300
    )
    assert found.stderr.splitlines()[-1].startswith("ImportError: Shardwright was taken out")
