"""Models and inputs that Python code makes, on the command line and as names in Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig

import shardwright
from shardwright.errors import ModelError, UsageError
from shardwright.planner.cli.main import main
from shardwright.planner.on_ranks.numeric import compare
from shardwright.planner.report.explain import explain
from shardwright.planner.trace.model.python_references import inputs, made
from tests import planning

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(5, 16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, kind):
        return self.down(self.up(x + self.table(kind)).relu())

def example():
    return (torch.randn(3, 19, 16),), {"kind": torch.randint(5, (3, 19))}

def broken():
    raise RuntimeError("no such thing")

number = 3
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    """A file with a model and inputs."""
    file = tmp_path / "own_net.py"
    file.write_text(CODE)
    return str(file)


def run(*words: str, code: int = 0) -> str:
    found = CliRunner().invoke(main, list(words))
    assert found.exit_code == code, found.output
    return found.output


def test_a_module_of_ones_own(net: str, tmp_path: Path) -> None:
    """Planned, explained, proven and run on ranks, all by name."""
    file, options = str(tmp_path / "plan.json"), ("--inputs", f"{net}:example")
    run("plan", f"{net}:Net", "--tp", "2", "-o", file, "--objective", "memory", *options)
    plan = shardwright.Plan.load(file)
    assert plan.model.architecture == "Net"
    assert "up.weight" in run("explain", file, "up.weight", f"{net}:Net", *options)
    report = run("check", file, f"{net}:Net", "--numeric", "--dtype", "float64", "--json", *options)
    assert json.loads(report.splitlines()[-1])["numeric"]["ok"]
    args, kwargs = inputs(f"{net}:example")
    assert planning.proven(f"{net}:Net", 2, args=args, kwargs=kwargs) == plan
    assert explain(plan, "up.weight", f"{net}:Net", args=args, kwargs=kwargs)


def test_a_module_at_hand_on_ranks() -> None:
    """It goes to the ranks as it is."""
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    args = (torch.randn(3, 19, 16),)
    assert compare(planning.plan(net, 2, args=args), net, args=args).ok


def test_inputs_in_a_file(net: str, tmp_path: Path) -> None:
    file = str(tmp_path / "inputs.pt")
    torch.save({"x": torch.randn(3, 19, 16), "kind": torch.zeros(3, 19, dtype=torch.long)}, file)
    assert "Net" in run("plan", f"{net}:Net", "--tp", "2", "--inputs", file)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_package:Net", "cannot find no_such_package:Net: No module named"),
        ("{net}:Nothing", "has no attribute 'Nothing'"),
        (":Net", "cannot import nothing: ValueError: Empty module name"),
        ("{own}/fails.py:Net", "fails.py: ZeroDivisionError: division by zero"),
        ("{own}/leaves.py:Net", "leaves.py: SystemExit: 3"),
        ("{net}:broken", "raised RuntimeError: no such thing"),
    ],
)
def test_code_that_is_not_there(net: str, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "fails.py").write_text("1 / 0")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(UsageError, match=text):
        made(name.format(net=net, own=tmp_path))


def test_what_is_no_input(net: str) -> None:
    with pytest.raises(UsageError, match="gives a int: inputs are a tensor"):
        inputs(f"{net}:number")
    with pytest.raises(UsageError, match="cannot read inputs from nowhere.pt"):
        inputs("nowhere.pt")
    with pytest.raises(UsageError, match="Give own.py:FUNCTION"):
        inputs("own.py")
    with pytest.raises(ModelError, match="cannot plan a int"):
        planning.plan(f"{net}:number", 2)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
}


def test_a_config_that_names_no_class() -> None:
    """It is that of a causal language model, where its kind is for that, and a user is told."""
    with pytest.warns(UserWarning, match="taken for LlamaForCausalLM"):
        plan = planning.plan(LlamaConfig(intermediate_size=64, **SIZES), 2)
    assert plan.model.architecture == "LlamaForCausalLM"
    with pytest.warns(UserWarning, match="taken for GPT2LMHeadModel"):
        planning.plan(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=101), 2)
    with pytest.raises(ModelError, match="names no class"):
        planning.plan(BertConfig(**SIZES), 2)
