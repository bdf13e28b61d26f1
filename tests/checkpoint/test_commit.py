"""At any moment a folder holds one checkpoint: wholly the old one, or wholly the new."""

import os
import resource
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import LlamaForCausalLM

from shardwright.errors import CheckpointError, DistributedError
from shardwright.runtime.checkpoint.commit import Draft
from shardwright.runtime.checkpoint.source import INDEX, Checkpoint
from shardwright.runtime.checkpoint.write import on_first, save
from shardwright.runtime.communication.mesh import Mesh
from tests.checkpoint.make import llama
from tests.ranks import run_ranks

ALONE = Mesh({})
SIZES = {"one file": "5GB", "several": "20KB"}


class Killed(BaseException):
    """What stands for kill -9: nothing is cleaned up after it."""


def filled(value: float) -> LlamaForCausalLM:
    model: Any = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def held(folder: Path) -> set[float]:
    """The values in the checkpoint that transformers loads, and that we find."""
    assert Checkpoint.open(folder).tensors
    model = LlamaForCausalLM.from_pretrained(folder)
    return {float(v) for p in model.parameters() for v in p.detach().unique()}


OPERATIONS = ((Path, "replace"), (Path, "unlink"), (Path, "write_text"), (os, "fsync"))


def failing_at(step: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file operation of that number in a save, and it alone, raise an error."""
    numbers = count()

    def failing(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(numbers) == step:
                raise error
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in OPERATIONS:
        failing(owner, name)


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be killed before the file operation of that number, in a save."""
    failing_at(step, Killed(), monkeypatch)
    monkeypatch.setattr(Draft, "close", lambda draft: os.close(draft.lock))


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", SIZES)
def test_killed_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    out, seen, step = tmp_path / "out", set[float](), 0
    save(filled(1), out, {}, ALONE, max_shard_size=SIZES[old])
    for step in count():
        with monkeypatch.context() as patch:
            killed_at(step, patch)
            try:
                save(filled(2), out, {}, ALONE, max_shard_size=SIZES[new])
            except Killed:
                pass
            else:
                break
        values = held(out)
        assert len(values) == 1, f"mixed when killed before step {step}"
        seen |= values
        if values == {2.0}:
            save(filled(1), out, {}, ALONE, max_shard_size=SIZES[old])
    assert step > 5 and seen == {1.0, 2.0} and held(out) == {2.0}
    save(filled(3), out, {}, ALONE, max_shard_size=SIZES[new])
    assert held(out) == {3.0}
    assert not [p for p in out.iterdir() if p.name.startswith(".")]  # nothing is left behind
    named = {e.file for e in Checkpoint.open(out).tensors.values()}
    assert {*out.glob("*.safetensors")} == named


def test_killed_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors has a temporary file of its own beside the one that it writes."""
    out = tmp_path / "out"
    save(filled(1), out, {}, ALONE)
    names = {p.name for p in out.iterdir()}

    def killed(tensors: Any, file: str, **_: Any) -> None:
        Path(file).with_name(".tmp0a1b2c").write_bytes(bytes(1000))
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", killed)
        patch.setattr(Draft, "close", lambda draft: os.close(draft.lock))
        with pytest.raises(Killed):
            save(filled(2), out, {}, ALONE)
    assert held(out) == {1.0}
    save(filled(3), out, {}, ALONE)
    assert held(out) == {3.0} and {p.name for p in out.iterdir()} == names


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", SIZES)
def test_an_error_at_any_step_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    """Or the new one where it was committed before; and says that it cannot write."""
    out, seen, errors = tmp_path / "out", set[float](), 0
    save(filled(1), out, {}, ALONE, max_shard_size=SIZES[old])
    before = {p.name for p in out.iterdir()}
    for step in count():
        with monkeypatch.context() as patch:
            failing_at(step, OSError(28, "No space left on device"), patch)
            try:
                save(filled(2), out, {}, ALONE, max_shard_size=SIZES[new])
                break
            except CheckpointError as error:
                assert str(error) == f"cannot write {out}: No space left on device"
        seen |= (values := held(out))
        errors += 1
        if values == {1.0}:
            assert {p.name for p in out.iterdir()} - {INDEX} == before - {INDEX}
        if values == {2.0}:
            save(filled(1), out, {}, ALONE, max_shard_size=SIZES[old])
            before = {p.name for p in out.iterdir()}
    assert errors >= 5 and 1.0 in seen and held(out) == {2.0}


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", SIZES)
def test_a_full_disk_leaves_the_old_one(tmp_path: Path, old: str, new: str) -> None:
    """No file may be longer than 1000 bytes here, which safetensors meets before it has one."""
    out = tmp_path / "out"
    save(filled(1), out, {}, ALONE, max_shard_size=SIZES[old])
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*out/model.*File too large"):
            save(filled(2), out, {}, ALONE, max_shard_size=SIZES[new])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_an_error_leaves_no_directory_that_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path) -> Path:
        if target.name == INDEX:
            raise OSError(28, "No space left on device")
        return original(path, target)

    original = Path.replace
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(filled(1), tmp_path / "out", {}, ALONE, max_shard_size=SIZES["several"])
    assert not (tmp_path / "out").exists()


def test_into_a_link_and_one_that_is_made(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    save(filled(1), tmp_path / "link", {}, ALONE)
    assert held(tmp_path / "elsewhere") == {1.0} and (tmp_path / "link").is_symlink()


def test_another_config_is_refused_before_anything_is_gathered(tmp_path: Path) -> None:
    save(filled(1), tmp_path / "out", {}, ALONE)
    other = filled(2)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
    text = r"out holds a checkpoint with another config \('rope_parameters' differs\)"
    with pytest.raises(CheckpointError, match=text):
        save(other, tmp_path / "out", {}, ALONE)
    assert held(tmp_path / "out") == {1.0}


def test_two_savers(tmp_path: Path) -> None:
    first = Draft.begin(tmp_path / "out", None)
    try:
        with pytest.raises(CheckpointError, match="another process is saving into .*out"):
            save(nn.Linear(2, 2), tmp_path / "out", {}, ALONE)
    finally:
        first.close()
    assert not (tmp_path / "out").exists()
    save(nn.Linear(2, 2), tmp_path / "out", {}, ALONE)


@pytest.mark.parametrize(
    "failure, kind, text",
    [
        (OSError(28, "No space left on device"), CheckpointError, "No space left on device"),
        (RuntimeError("surprise"), DistributedError, "surprise"),
    ],
)
def test_all_ranks_hear_of_a_failure(failure: Exception, kind: type, text: str) -> None:
    def broken() -> None:
        raise failure

    def work(mesh: Mesh) -> str:
        with pytest.raises((kind, CheckpointError, RuntimeError)) as caught:
            on_first(broken, "out")
        assert mesh["tp"].rank == 0 or caught.type is kind
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert text in first and second.startswith("saving failed on rank 0") and text in second


def test_nothing_new_is_left_where_a_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot write .*Is a directory"):
        save(llama(), tmp_path, {}, ALONE)
    assert [p.name for p in tmp_path.iterdir()] == ["generation_config.json"]


def test_settings_of_generation_that_contradict_each_other(tmp_path: Path) -> None:
    model = llama()
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.3
    with pytest.raises(CheckpointError, match=r"^the model's generation_config cannot be saved.*"):
        save(model, tmp_path / "out", {}, ALONE)
    assert not (tmp_path / "out").exists()
