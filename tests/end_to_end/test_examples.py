"""Every example runs as its own docstring says, and says at its end that all is well."""

import ast
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.demo_launch import ROOT, free_port, torchrun
from benchmarks.training import write_start
from examples import train_3d

SAYS = {
    "generate": "the same tokens as the unsplit model",
    "lora": "merged into the unsplit model: as trained unsplit",
    "own_module": "outputs and gradients are equal",
    "own_rule": "outputs and gradients are equal",
    "restart": "3 starts, 8 steps, and the losses of a run without restart",
    "train": "saved, and read by transformers",
    "trainer": "that of the checkpoint, as plain transformers reads it",
}
"""Example -> what it prints when it has compared all that it computes; `train_3d` is run below."""


def command(name: str) -> str:
    """How to run an example: the first line of its docstring that is set off."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text())) or ""
    found = re.search(r"^    (.+)$", text, re.MULTILINE)
    assert found, f"{name} does not say how to run it"
    return found[1]


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*SAYS, "train_3d"}


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name: str, tmp_path: Path) -> None:
    how = re.sub(r" \[?DIRECTORY.*", "", command(name))
    arguments = [tmp_path] if how != command(name) else []
    if start := re.fullmatch(rf"torchrun --nproc-per-node (\d) (.* )?examples/{name}\.py", how):
        options = (start[2] or "").split()
        ranks = int(start[1])
        out = torchrun(f"examples.{name}", arguments, ranks=ranks, options=options, timeout=120)
    else:
        assert how == f"python examples/{name}.py"
        run = [sys.executable, "-m", f"examples.{name}", *map(str, arguments)]
        out = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert SAYS[name] in out


def test_a_run_goes_on_in_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tp 2 on two nodes, dp 2 x tp 2, dp 2 x cp 2: as one process without a stop.

    Some weights are fused, which torch's checkpoints know nothing of.
    """
    assert command("train_3d") == (
        "DP_SIZE=2 TP_SIZE=2 torchrun --nproc-per-node 4 examples/train_3d.py DIRECTORY [--resume]"
    )

    def run(ranks: int, to: int, *resume: str, nodes: int = 1, **sizes: int) -> str:
        for name, size in {"DP": 1, "CP": 1, "TP": 1, **sizes}.items():
            monkeypatch.setenv(f"{name}_SIZE", str(size))
        monkeypatch.setenv("STEPS", str(to))
        port = str(free_port())

        def node(number: int) -> str:
            """What the agent of one node starts, which knows of the others by an address."""
            where = ["--nnodes", str(nodes), "--node-rank", str(number), "--master-port", port]
            arguments = [tmp_path, *resume]
            each = ranks // nodes
            return torchrun("examples.train_3d", arguments, ranks=each, timeout=120, options=where)

        with ThreadPoolExecutor(nodes) as agents:
            return "".join(agents.map(node, range(nodes)))

    write_start("phi3", torch.float32, tmp_path, num_key_value_heads=4)
    out = run(2, 2, nodes=2, TP=2)
    out += run(4, 4, "--resume", DP=2, TP=2) + run(4, 6, "--resume", DP=2, CP=2)
    found = [tuple(map(float, e)) for e in re.findall(r"step (\d) loss (\S+) norm (\S+)", out)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start").train()
    optimizer = train_3d.optimizer_of(model)
    for step in range(6):
        want = train_3d.one_step(model, optimizer, train_3d.batch(step))
        torch.testing.assert_close(
            found[step], (float(step), *(x.item() for x in want)), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("name", ["TP", "CP"])
def test_sizes_that_cannot_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setenv(f"{name}_SIZE", "3")
    with pytest.raises(SystemExit, match="not the 2 ranks"):
        train_3d.sizes()
