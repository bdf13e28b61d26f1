"""Every example runs with the arguments of its docstring, and says that all is well.

Ranks are forked, with the environment of torchrun: that is much faster than torchrun, which one
example uses, and which `tests/test_docs.py` runs.
"""

import ast
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.demo_launch import ROOT
from benchmarks.forked import run_forked
from benchmarks.training import write_start
from examples import restart, train_3d

from .as_main import as_main

SAYS = {
    "generate": "the same tokens as the unsplit model",
    "lora": "merged into the unsplit model: as trained unsplit",
    "own_module": "outputs and gradients are equal",
    "own_rule": "outputs and gradients are equal",
    "pipeline": "the same image as the unsplit pipeline",
    "train": "saved, and read by transformers",
    "trainer": "that of the checkpoint, as plain transformers reads it",
}
"""Example -> what it prints when it has compared all that it computes; others are run below."""


def command(name: str) -> str:
    """How to run an example: the first line of its docstring that is set off."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text())) or ""
    found = re.search(r"^    (.+)$", text, re.MULTILINE)
    assert found, f"{name} does not say how to run it"
    return found[1]


def started(
    name: str, arguments: list[str], ranks: int, folder: Path, environ: dict[str, str] | None = None
) -> str:
    """What the ranks of an example print, if all end well."""
    own = [{**(environ or {})} for _ in range(ranks)]
    ends = run_forked(ranks, as_main, (f"examples.{name}", arguments), folder, environ=own)
    assert [end.how for end in ends] == ["well"] * ranks, [end.log for end in ends]
    return "".join(end.log for end in ends)


def test_every_example_is_run() -> None:
    found = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert found == {*SAYS, "restart", "train_3d"}


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name: str, tmp_path: Path) -> None:
    how = re.sub(r" \[?DIRECTORY.*", "", command(name))
    arguments = [str(tmp_path)] if how != command(name) else []
    start = re.fullmatch(rf"torchrun --nproc-per-node (\d) examples/{name}\.py", how)
    assert start
    assert SAYS[name] in started(name, arguments, int(start[1]), tmp_path)


@pytest.mark.long
def test_ranks_that_are_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By torchrun, after one was killed."""
    assert command("restart") == "python examples/restart.py DIRECTORY [RANK:STEP...]"
    restart.main(tmp_path, ["1:5"])
    said = "2 starts, 8 steps, and the losses of a run without restart"
    assert said in capfd.readouterr().out


def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    """tp 2, dp 2 x tp 2, dp 2 x cp 2: as one process without a stop.

    Some weights are fused, which torch's checkpoints know nothing of.
    """
    assert command("train_3d") == (
        "DP_SIZE=2 TP_SIZE=2 torchrun --nproc-per-node 4 examples/train_3d.py DIRECTORY [--resume]"
    )

    def run(ranks: int, to: int, *resume: str, **sizes: int) -> str:
        given = {"DP": 1, "CP": 1, "TP": 1, **sizes}
        return trained_3d(tmp_path, ranks, to, *resume, **given)

    write_start("phi3", torch.float32, tmp_path, num_key_value_heads=4)
    out = run(2, 2, TP=2)
    out += run(4, 4, "--resume", DP=2, TP=2) + run(4, 6, "--resume", DP=2, CP=2)
    assert_as_in_one_process(out, tmp_path / "start", 6)


def test_experts_are_shared_out(tmp_path: Path) -> None:
    """Ten steps with dp 2 x ep 2, of five experts, as in one process."""
    write_start("qwen3_moe", torch.float32, tmp_path, num_experts=5)
    assert_as_in_one_process(trained_3d(tmp_path, 4, 10, DP=2, EP=2), tmp_path / "start", 10)


def trained_3d(directory: Path, ranks: int, to: int, *options: str, **sizes: int) -> str:
    """What the example prints, up to a step."""
    environ = {"STEPS": str(to), **{f"{name}_SIZE": str(n) for name, n in sizes.items()}}
    return started("train_3d", [str(directory), *options], ranks, directory, environ)


def assert_as_in_one_process(out: str, start: Path, steps: int) -> None:
    """The losses and norms that the example printed."""
    found = [tuple(map(float, e)) for e in re.findall(r"step (\d) loss (\S+) norm (\S+)", out)]
    model = AutoModelForCausalLM.from_pretrained(start).train()
    optimizer = train_3d.optimizer_of(model)
    for step in range(steps):
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
