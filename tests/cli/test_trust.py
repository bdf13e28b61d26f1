"""Code that comes with a model: it runs when it is asked for, and never else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers.dynamic_module_utils as dynamic

import shardwright
from benchmarks.faults.checkpoints import local_part
from shardwright.errors import ModelError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.build import model_class
from shardwright.runtime.model.config import read_config
from tests import planning
from tests.cli.conftest import Run
from tests.ranks import run_ranks

CODE = """
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

Path("{ran}").write_text("this code ran")


class OwnConfig(PreTrainedConfig):
    model_type = "of_its_own"

    def __init__(self, width=32, vocab_size=64, **kwargs):
        self.width, self.vocab_size = width, vocab_size
        super().__init__(**kwargs)


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None):
        x = self.embed(input_ids)
        return CausalLMOutput(logits=self.head(x + self.down(torch.relu(self.up(x)))))
"""

CONFIG = {
    "model_type": "of_its_own",
    "architectures": ["OwnModel"],
    "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    "width": 32,
    "vocab_size": 64,
    "dtype": "float64",
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose code writes `ran` beside it when it runs."""
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / f"own_{tmp_path.name}"
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(ran=tmp_path / "ran"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_it_never_runs_unasked(own: Path, run: Run) -> None:
    """Nor is anybody asked on the terminal; on stdin lies a yes."""
    text = (
        f"the config of {own} comes with code of its own, which runs only with "
        "--trust-remote-code (trust_remote_code=True)"
    )
    result = run("plan", own, "--tp", 2)
    assert (result.exit_code, result.stderr) == (1, f"Error: {text}\n")
    with pytest.raises(ModelError) as error:
        planning.plan(own, 2)
    assert str(error.value) == text
    assert not (own.parent / "ran").exists()


def test_code_of_the_model_alone_does_not_run_either(own: Path, run: Run) -> None:
    """The config is one that transformers knows."""
    config = {**CONFIG, "model_type": "llama", "auto_map": {"AutoModel": "own.OwnModel"}}
    (own / "config.json").write_text(json.dumps(config))
    result = run("plan", own, "--tp", 2)
    assert result.exit_code == 1
    assert "has no class OwnModel: its code comes with the model and runs only" in result.stderr
    assert not (own.parent / "ran").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_kernels_of_the_hub_are_code_too(model: Path, tmp_path: Path, run: Run, key: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: "someone/kernel"}))
    result = run("plan", tmp_path, "--tp", 2)
    assert result.exit_code == 1
    assert "names code on the hub (" in result.stderr and ": someone/kernel)" in result.stderr


def test_asked_for_it_is_planned_checked_and_loaded(own: Path, run: Run) -> None:
    file = own.parent / "plan.json"
    made = run("plan", own, "--tp", 2, "--trust-remote-code", "-o", file)
    assert made.exit_code == 0, made.stderr
    assert (own.parent / "ran").read_text() == "this code ran"
    assert run("check", file, own, "--trust-remote-code").exit_code == 0
    assert run("check", file, own).exit_code == 1
    plan = Plan.load(file)
    assert "@tp" in plan.modules["up"].parameters["weight"].placement
    assert shardwright.check(plan, own, trust_remote_code=True) == plan

    config = read_config(own, trust_remote_code=True)
    whole = model_class(config, True)(config).double().eval()
    whole.save_pretrained(own)  # type: ignore[operator]
    ids = torch.arange(12).view(2, 6)
    want = whole(input_ids=ids).logits

    def rank(mesh: Mesh) -> torch.Tensor:
        with pytest.raises(ModelError, match="runs only with --trust-remote-code"):
            local_part(own, plan, mesh)
        local = local_part(own, plan, mesh, trust_remote_code=True)
        return local(input_ids=ids).logits

    for found in run_ranks(2, rank):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)
