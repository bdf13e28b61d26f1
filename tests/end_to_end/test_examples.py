"""Every example runs as its own docstring says, and says at its end that all is well."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.demo_launch import ROOT, torchrun

SAYS = {
    "own_module": "outputs and gradients are equal",
    "own_rule": "outputs and gradients are equal",
    "generate": "the same tokens as the unsplit model",
    "restart": "3 starts, 8 steps, and the losses of a run without restart",
    "train": "saved, and read by transformers",
}
"""Example -> what it prints when it has compared all that it computes."""


def command(name: str) -> str:
    """How to run an example: the first line of its docstring that is set off."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text())) or ""
    found = re.search(r"^    (.+)$", text, re.MULTILINE)
    assert found, f"{name} does not say how to run it"
    return found[1]


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name: str, tmp_path: Path) -> None:
    how = re.sub(r" \[?DIRECTORY.*", "", command(name))
    arguments = [tmp_path] if how != command(name) else []
    if start := re.fullmatch(rf"torchrun --nproc-per-node 2 (.* )?examples/{name}\.py", how):
        options = (start[1] or "").split()
        out = torchrun(f"examples.{name}", arguments, options=options, timeout=120)
    else:
        assert how == f"python examples/{name}.py"
        run = [sys.executable, "-m", f"examples.{name}", *map(str, arguments)]
        out = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert SAYS[name] in out
