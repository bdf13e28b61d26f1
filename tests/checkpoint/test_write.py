"""What is saved from several ranks, plain transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

import shardwright
from shardwright.errors import CheckpointError, UsageError
from shardwright.planner.contract.notation import parse
from shardwright.runtime.checkpoint.load import load_weights
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.checkpoint.write import parse_size, save
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.build import empty_model
from shardwright.runtime.redistribution import reshard
from tests.checkpoint.make import gpt2, gpt2_config, llama, llama_config
from tests.ranks import run_ranks

ALONE = Mesh({})
LLAMA = {
    "model.embed_tokens.weight": "53@tp, 32",
    "lm_head.weight": "53@tp, 32",
    "model.layers.0.self_attn.q_proj.weight": "4@tp*8, 32",
    "model.layers.0.self_attn.o_proj.weight": "32, 4@tp*8",
    "model.layers.1.mlp.down_proj.weight": "32, 48@tp",
}


@pytest.mark.parametrize("size", ["5GB", "10KB"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_round_trip(tmp_path: Path, ranks: int, size: str) -> None:
    model = llama()
    model.generation_config.max_length = 17
    model.save_pretrained(tmp_path / "in")
    placements = {name: parse(text) for name, text in LLAMA.items()}

    def work(mesh: Mesh) -> None:
        local = empty_model(LlamaForCausalLM, llama_config())
        local.generation_config = model.generation_config
        load_weights(local, Checkpoint.open(tmp_path / "in"), placements, mesh.coords)
        save(local, tmp_path / "out", placements, mesh, max_shard_size=size)

    run_ranks(ranks, work)
    back: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(back) is LlamaForCausalLM
    assert back.generation_config.max_length == 17
    expected = model.state_dict()
    assert back.state_dict().keys() == expected.keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (size == "10KB")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]  # no temporary files


def test_files_are_no_larger_than_asked(tmp_path: Path) -> None:
    save(llama(), tmp_path / "out", {}, ALONE, max_shard_size="20KB")
    out = Checkpoint.open(tmp_path / "out")
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert sum(e.nbytes for e in out.tensors.values() if e.file == file) <= 20_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == out.nbytes


def test_tied_names_once_and_dtype(tmp_path: Path) -> None:
    model = gpt2().bfloat16()
    save(model, tmp_path / "out", {}, ALONE)
    assert "lm_head.weight" not in Checkpoint.open(tmp_path / "out").tensors
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(back) is GPT2LMHeadModel
    assert back.dtype == torch.bfloat16
    assert torch.equal(back.lm_head.weight, model.lm_head.weight)


def test_what_transformers_leaves_out(tmp_path: Path) -> None:
    """It computes that anew when it reads a checkpoint, and so are those of whole models."""
    model: Any = llama()
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    model.save_pretrained(tmp_path / "whole")
    save(model, tmp_path / "out", {}, ALONE)
    names = [Checkpoint.open(tmp_path / name).tensors for name in ("out", "whole")]
    assert set(names[0]) == set(names[1])
    assert "model.norm.weight" not in names[0]


def test_files_of_a_tokenizer_come_along(tmp_path: Path) -> None:
    """Those of the directory that the model is of, unless others are there."""
    model = llama()
    model.save_pretrained(tmp_path / "in")
    for name in ("tokenizer.json", "merges.txt", "preprocessor_config.json", "notes.txt", "x.py"):
        (tmp_path / "in" / name).write_text("in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "merges.txt").write_text("out")
    model.config.name_or_path = str(tmp_path / "in")
    save(model, tmp_path / "out", {}, ALONE)
    copied = {p.name: p.read_text() for p in (tmp_path / "out").iterdir() if "model" not in p.name}
    del copied["config.json"], copied["generation_config.json"]
    assert copied == {
        "tokenizer.json": "in", "merges.txt": "out", "preprocessor_config.json": "in"
    }  # fmt: skip


def test_saving_again_replaces(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(llama(), out, {}, ALONE, max_shard_size="20KB")
    (out / "tokenizer.json").write_text("{}")
    changed = llama()
    with torch.no_grad():
        changed.lm_head.weight.zero_()
    save(changed, out, {}, ALONE)
    names = {p.name for p in out.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert not any("-of-" in name or "index" in name for name in names)
    back = LlamaForCausalLM.from_pretrained(out)
    assert back.lm_head.weight.eq(0).all()


def test_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    save(llama(), out, {}, ALONE)
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def broken(tensor: torch.Tensor, placement: object, mesh: object) -> torch.Tensor:
        raise RuntimeError("a rank died")

    monkeypatch.setattr(reshard, "gather_whole", broken)
    with pytest.raises(RuntimeError, match="a rank died"):
        save(llama(), out, {"lm_head.weight": parse("53@tp, 32")}, ALONE)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no value yet: load the weights"):
        save(empty_model(GPT2LMHeadModel, gpt2_config()), tmp_path / "out", {}, ALONE)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file: give a directory"):
        save(gpt2(), tmp_path / "file", {}, ALONE)
    with pytest.raises(CheckpointError, match="cannot write"):
        save(gpt2(), tmp_path / "file" / "below", {}, ALONE)


def test_sizes() -> None:
    assert [parse_size(s) for s in (5, "5", "5B", "2KB", "3 MB", "1gb", "1KiB")] == [
        5,
        5,
        5,
        2000,
        3 * 10**6,
        10**9,
        1024,
    ]
    for wrong in ("", "GB", "-1", "1.5GB", "1TB", 0):
        with pytest.raises(UsageError, match="is not a size"):
            parse_size(wrong)


@pytest.mark.parametrize("directory", [None, "", 3])
def test_a_directory_is_needed(directory: Any) -> None:
    split = torch.nn.Linear(2, 2)
    split._shardwright_mesh = ALONE  # type: ignore[assignment]
    with pytest.raises(UsageError, match="save writes into a directory, and was given"):
        shardwright.save(split, directory)
