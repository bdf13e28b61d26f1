"""Code that comes with a model: it runs when it is asked for, and never else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers.dynamic_module_utils as dynamic
from transformers import (
    BertConfig,
    CLIPVisionConfig,
    EncoderDecoderConfig,
    LlamaConfig,
    LlavaConfig,
    ViTConfig,
)
from transformers.models.auto import auto_factory

import shardwright
from benchmarks.faults.checkpoints import local_part
from shardwright.errors import ModelError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.build import building, model_class
from shardwright.runtime.model.config import read_config
from shardwright.runtime.model.hub import Hub
from tests import planning
from tests.checkpoint.make import write
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


@pytest.mark.parametrize("given", [None, "no", 1])
def test_only_true_is_a_yes(own: Path, monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    """With None transformers would prompt on the terminal, where a yes lies; "no" is true."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    refusal = ModelError if given is None else UsageError
    with pytest.raises(refusal):
        read_config(own, Hub(trust_remote_code=cast(Any, given)))
    with pytest.raises(refusal):
        planning.plan(own, 2, trust_remote_code=cast(Any, given))
    if given is not None:
        said: Any = {"architectures": ["OwnModel"], "auto_map": CONFIG["auto_map"]}
        config = LlamaConfig(**said)
        with pytest.raises(UsageError), building(config, Hub(trust_remote_code=given)):
            pass
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

    config = read_config(own, Hub(trust_remote_code=True))
    whole = model_class(config, Hub(trust_remote_code=True))(config).double().eval()
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


SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


@pytest.fixture
def nested(own: Path) -> Path:
    """An encoder and a decoder that transformers knows, with a head of its own for the decoder."""
    encoder = BertConfig(vocab_size=64, max_position_embeddings=64, **SIZES)
    decoder = ViTConfig(**SIZES, architectures=["OwnHead"])
    config: Any = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.architectures, config.pad_token_id = ["EncoderDecoderModel"], 0
    config.decoder.auto_map = {"AutoModelForCausalLM": "own.OwnHead"}
    config.save_pretrained(own)
    (own / "own.py").write_text(HEAD.format(ran=own.parent / "ran"))
    return own


HEAD = """
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, ViTConfig
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

Path("{ran}").write_text("this code ran")


class OwnHead(PreTrainedModel):
    config_class = ViTConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(64, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, 64, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, encoder_hidden_states=None, **kwargs):
        x = self.embed(input_ids) + encoder_hidden_states.mean(1, keepdim=True)
        return CausalLMOutputWithCrossAttentions(logits=self.head(x))
"""

INPUTS = """
import torch

def inputs():
    ids = torch.arange(57).view(3, 19)
    return (), {"input_ids": ids, "decoder_input_ids": ids}
"""


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Somebody who answers yes to all that is asked on the terminal; what was asked."""
    asked: list[str] = []

    def answer(prompt: str = "") -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    return asked


def test_code_of_a_nested_config_never_runs_unasked(
    nested: Path, run: Run, yes: list[str], planned: tuple[Path, object]
) -> None:
    """In no command, and not when weights are loaded; nobody is asked."""
    (nested / "inputs.py").write_text(INPUTS)
    given = ("--inputs", f"{nested / 'inputs.py'}:inputs")
    found = [
        run("plan", nested, "--tp", 2),
        run("plan", nested, "--tp", 2, *given),
        run("check", planned[0], nested),
        run("check", planned[0], nested, "--numeric"),
        run("show", planned[0], "--model", nested, "--html", nested / "page.html"),
        run("export", planned[0], nested, "--to", "transformers"),
        run("export", planned[0], nested, "--to", "torch"),
    ]
    for result in found:
        assert result.exit_code == 1, result.output
        assert "names code of its own (decoder.auto_map), which runs only" in result.stderr
        assert result.stderr.count("\n") == 1
    write(nested, {"weight": torch.ones(1)})
    with pytest.raises(ModelError, match="names code of its own"):
        planning.plan(read_config(nested), 2)
    with pytest.raises(ModelError, match="names code of its own"):
        local_part(nested, Plan.load(planned[0]), Mesh.shape_only({}))
    assert not yes
    assert not (nested.parent / "ran").exists()


def test_trust_reaches_nested_configs(nested: Path, run: Run, yes: list[str]) -> None:
    (nested / "inputs.py").write_text(INPUTS)
    given = ("--inputs", f"{nested / 'inputs.py'}:inputs", "--trust-remote-code")
    file = nested.parent / "plan.json"
    made = run("plan", nested, "--tp", 2, *given, "-o", file)
    assert made.exit_code == 0, made.stderr
    assert (nested.parent / "ran").exists()
    assert run("check", file, nested, *given).exit_code == 0
    assert not yes
    assert auto_factory.resolve_trust_remote_code is dynamic.resolve_trust_remote_code


def test_a_kernel_that_a_nested_config_names() -> None:
    """Also where the config comes as an object: it may have been read from anywhere."""
    config: Any = LlavaConfig(
        text_config=LlamaConfig(**SIZES),
        vision_config=CLIPVisionConfig(**SIZES),
        architectures=["LlavaForConditionalGeneration"],
    )
    config.text_config._attn_implementation_internal = "someone/kernel"
    with pytest.raises(ModelError, match=r"code on the hub \(text_config\..*: someone/kernel\)"):
        planning.plan(config, 2)
