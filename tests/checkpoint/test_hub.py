"""Hub ids with a revision and a folder of downloads; models split without their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

import shardwright
from shardwright.errors import CheckpointError, ModelError
from shardwright.planner.cli.main import main
from shardwright.planner.report.explain import explain
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.hub import Hub
from tests.planning import plan
from tests.predicted import held
from tests.ranks import run_ranks

NAME = "somebody/a-model"


def config(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocabulary, architectures=["LlamaForCausalLM"],
        dtype="float64",
    )  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Downloads as huggingface_hub keeps them: a small vocabulary on main, a large one on `v2`."""
    root = tmp_path_factory.mktemp("hub")
    home = root / f"models--{NAME.replace('/', '--')}"
    for revision, commit, vocabulary in (("main", "a" * 40, 64), ("v2", "b" * 40, 96)):
        torch.manual_seed(vocabulary)
        model: Any = AutoModelForCausalLM.from_config(config(vocabulary))
        model.save_pretrained(home / "snapshots" / commit)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / revision).write_text(commit)
    return root


def load(file: Any, **how: Any) -> list[torch.nn.Module]:
    """The model on each of two ranks."""

    def rank(_: Mesh) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return shardwright.load(NAME, file, mesh=mesh, device="cpu", **how)

    return run_ranks(2, rank)


def test_each_revision_is_planned_checked_explained_and_loaded(cache: Path) -> None:
    at: dict[str, Any] = {"cache_dir": cache, "local_files_only": True}
    made = None
    for revision, vocabulary in {None: 64, "v2": 96}.items():
        at["revision"] = revision
        made = plan(NAME, 2, **at)
        assert made.model.parameters["lm_head.weight"] == [vocabulary, 32]
        assert shardwright.check(made, NAME, **at) == made
        assert explain(made, "lm_head.weight", NAME, **at)[0].shape == [vocabulary, 32]
        for model in load(made, **at):
            assert model.config.vocab_size == vocabulary  # type: ignore[union-attr]
            assert model.shardwright_report.read  # type: ignore[union-attr]
    with pytest.raises(shardwright.PlanError, match=r"shape \[96, 32\], here \[64, 32\]"):
        load(made, cache_dir=cache, local_files_only=True)


def test_what_is_not_there_is_said(cache: Path, tmp_path: Path) -> None:
    at: dict[str, Any] = {"cache_dir": cache, "local_files_only": True}
    with pytest.raises(ModelError, match=f"cannot find the config of {NAME} at revision v3"):
        plan(NAME, 2, revision="v3", **at)
    made = plan(NAME, 2, **at)
    with pytest.raises(CheckpointError, match=f"cannot fetch {NAME}"):
        load(made, cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(TypeError, match="revison"):
        shardwright.check(made, NAME, revison="v2")


def test_commands_take_them(cache: Path, tmp_path: Path) -> None:
    def run(*words: object) -> Result:
        return CliRunner().invoke(main, [*map(str, words)])

    at = ("--revision", "v2", "--cache-dir", cache, "--local-files-only")
    file = tmp_path / "plan.json"
    made = run("plan", NAME, "--tp", 2, "--objective", "memory", "-o", file, *at)
    assert made.exit_code == 0, made.stderr
    assert json.loads(file.read_text())["model"]["parameters"]["lm_head.weight"] == [96, 32]
    assert run("check", file, NAME, *at).exit_code == 0
    assert run("explain", file, "lm_head.weight", NAME, *at).exit_code == 0
    assert run("check", file, NAME, *at[2:]).exit_code == 1


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Hub(token="secret")) + str({"hub": Hub(token="secret")})
    assert Hub(token="secret").options() == {"token": "secret"}
    assert Hub(token=False).options() == {"token": False} and Hub().options() == {}


def whole_norm(model: torch.nn.Module) -> torch.Tensor:
    name = "model.norm.weight"
    return shardwright.full_tensors(model, {name: model.get_parameter(name).detach()})[name]


def test_a_model_is_split_without_weights(tmp_path: Path) -> None:
    """A config is enough; what ranks hold and compute has the shapes that it would have."""
    config(64).save_pretrained(tmp_path)
    made = plan(tmp_path, 2)
    ids = torch.arange(12).view(2, 6)

    def rank(_: Mesh) -> tuple[int, torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        how: Any = {"mesh": mesh, "device": "cpu"}
        with pytest.raises(CheckpointError, match="no safetensors"):
            shardwright.load(tmp_path, made, **how)
        model = shardwright.load(tmp_path, made, weights=False, **how)
        logits = model(input_ids=ids).logits
        logits.sum().backward()
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert not hasattr(model, "shardwright_report")
        return held(model), logits, whole_norm(model)

    (first, a, norm), (second, b, other) = run_ranks(2, rank)
    assert [first, second] == made.predicted.parameter_bytes
    assert a.shape == (2, 6, 64) and a.isfinite().all() and a.std() > 0
    assert torch.equal(a, b) and torch.equal(norm, other)
