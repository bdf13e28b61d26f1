"""What `--dump` writes: all that the planner saw, and what it decided, with source lines."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright import InfeasibleError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.prepare import prepare
from shardwright.planner.problem.readable_names import axis_names
from tests import planning
from tests.cli.conftest import tiny

FILES = {"README.txt", "axes.txt", "decisions.txt", "graph.txt", "states.txt"}


class Gated(nn.Module):
    """Its hidden tensor is two segments of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(a * b)


def test_everything_that_was_seen_is_written(tmp_path: Path) -> None:
    model = tiny()
    plan = planning.proven(model, 2, dump=tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == FILES | {"plan.json"}
    assert Plan.load(tmp_path / "plan.json") == plan
    text = {p.stem: p.read_text() for p in tmp_path.iterdir()}
    task = prepare(model, 2)
    for op in task.graph.ops:
        assert re.search(rf"^{op.outputs[0]}:.* = {op.call.op}\(", text["graph"], re.M)
        assert op.source in text["graph"] and f"\n{op.name}: " in text["axes"]
    for name in task.graph.tensors:
        assert f"\n{name}" in text["states"] and f"\n{name}: " in text["axes"]
    for parameter, _ in task.source.module.named_parameters(remove_duplicate=False):
        if "layers.1" not in parameter:  # like blocks are traced once
            assert parameter in text["graph"]
    for word in ("1. solve", "run the plan on meta", "proven optimal by cpsat", "-> holds"):
        assert word in text["decisions"]
    assert {line.split()[0] for line in text["README"].splitlines() if line} >= INDEX_LINES


INDEX_LINES = {f"{p}" for p in FILES - {"README.txt"}} | {"plan.json"}


def test_what_was_chosen_is_marked_once_everywhere(tmp_path: Path) -> None:
    planning.plan(Gated(), 2, args=(torch.zeros(3, 19, 8),), dump=tmp_path)
    states = re.split(r"\n(?=\S)", (tmp_path / "states.txt").read_text())[1:]
    assert states and all(block.count("\n  * ") == 1 for block in states)
    chosen = next(b for b in states if b.startswith("p_up_weight.stored"))
    assert "  * 1: 16@tp + 16@tp, 8   [up.weight[0.0] over tp]" in chosen


def test_axes_have_one_name_each_after_their_parameters() -> None:
    task = prepare(Gated(), 2, args=(torch.zeros(3, 19, 8),))
    names = axis_names(task.graph, task.axes)
    assert len(set(names.values())) == len(names)
    assert {"up.weight[0.0]", "up.weight[1]", "down.weight[0]"} <= set(names.values())


def test_it_is_written_where_there_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError):
        planning.plan(tiny(), 2, memory=1000, sequence_parallel=False, dump=tmp_path / "why")
    assert {p.name for p in (tmp_path / "why").iterdir()} == FILES
    assert "no plan fits 1,000 bytes a rank" in (tmp_path / "why" / "decisions.txt").read_text()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write .*file"):
        planning.plan(Gated(), 2, args=(torch.zeros(3, 19, 8),), dump=tmp_path / "file")


@pytest.mark.parametrize("inside", ["", "new/deep"])
def test_a_full_disk_leaves_the_folder_as_it_was(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for the first files, not for the third."""
    write, folder = Path.write_text, tmp_path / inside
    (tmp_path / "README.txt").write_text("mine")

    def until_full(self: Path, *text: str) -> int:
        if self.name == "decisions.txt":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *text)

    monkeypatch.setattr(Path, "write_text", until_full)
    with pytest.raises(UsageError, match=f"cannot write {folder}: No space left on device"):
        planning.plan(tiny(), 2, dump=folder)
    assert [p.name for p in tmp_path.iterdir()] == ["README.txt"]
    assert (tmp_path / "README.txt").read_text() == "mine"
