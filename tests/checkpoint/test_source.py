"""Finding the tensors of a checkpoint, and what is said where it is damaged."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from shardwright.errors import CheckpointError
from shardwright.runtime.checkpoint import source
from shardwright.runtime.checkpoint.source import INDEX, Checkpoint
from shardwright.runtime.model.hub import Hub
from tests.checkpoint.make import write, write_index

A = torch.arange(12, dtype=torch.float32).reshape(3, 4)
B = torch.ones(5, dtype=torch.bfloat16)


def refused(path: Path | str, *texts: str) -> None:
    """Opening `path` fails with one line that holds `texts`."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert "\n" not in message
    for text in texts:
        assert text in message, message


def test_single(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": A, "b": B}))
    assert set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.tensors["a"][:3] == (tmp_path / "model.safetensors", torch.float32, (3, 4))
    assert checkpoint.nbytes == 58
    assert checkpoint.dtype == torch.float32


def test_sharded(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": A}, {"b": B}))
    assert checkpoint.tensors["a"].file.name == "model-00001-of-00002.safetensors"
    assert checkpoint.tensors["b"].file.name == "model-00002-of-00002.safetensors"


def test_index_of_another_name(tmp_path: Path) -> None:
    write(tmp_path, {"a": A}, {"b": B})
    index = tmp_path / "model.safetensors.index.json"
    index.rename(tmp_path / "weights.fp16.safetensors.index.json")
    assert set(Checkpoint.open(tmp_path).tensors) == {"a", "b"}
    shutil.copy(
        tmp_path / "weights.fp16.safetensors.index.json", tmp_path / "x.safetensors.index.json"
    )
    refused(tmp_path, "several indices", "keep one")


def test_one_file_of_another_name(tmp_path: Path) -> None:
    (write(tmp_path, {"a": A}) / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert set(Checkpoint.open(tmp_path).tensors) == {"a"}


def test_dtype_is_that_of_most_bytes(tmp_path: Path) -> None:
    tensors = {"a": A.to(torch.float16), "b": torch.ones(2), "i": torch.ones(99, dtype=torch.int64)}
    assert Checkpoint.open(write(tmp_path / "x", tensors)).dtype == torch.float16
    rest = {"i": tensors["i"], "q": torch.ones(99).to(torch.float8_e4m3fn)}
    assert Checkpoint.open(write(tmp_path / "y", rest)).dtype is None


def test_not_a_directory(tmp_path: Path) -> None:
    refused(tmp_path / "gone", "gone does not exist", "give the directory")
    file = write(tmp_path, {"a": A}) / "model.safetensors"
    refused(file, "is a file", "give the directory")


def test_no_safetensors(tmp_path: Path) -> None:
    refused(tmp_path, "has no safetensors file", "model.safetensors.index.json")


def test_pickled_only(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "pickled weights only (pytorch_model.bin)", "save_pretrained()")


def test_several_files_and_no_index(tmp_path: Path) -> None:
    write(tmp_path, {"a": A}, {"b": B})
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "2 safetensors files and neither", "save_pretrained")


def test_index_names_a_missing_file(tmp_path: Path) -> None:
    write(tmp_path, {"a": A}, {"b": B})
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(
        tmp_path, "index.json names model-00002-of-00002.safetensors, which is not there", "fetch"
    )


def test_index_names_a_missing_tensor(tmp_path: Path) -> None:
    write(tmp_path, {"a": A}, {"b": B})
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    write_index(tmp_path, {"a": first, "b": second, "c": second})
    refused(tmp_path, f"the index says that c is in {second}, but it is not", "same revision")
    write_index(tmp_path, {"a": first, "b": first})
    write(tmp_path / "x", {"a": A}, {"b": B})
    write_index(tmp_path / "x", {"a": second, "b": first})
    refused(tmp_path / "x", "the index says that")


@pytest.mark.parametrize(
    "text", ["not json", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[]"]
)
def test_index_is_not_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "is not a safetensors index", "fetch it again")


def test_key_in_two_files(tmp_path: Path) -> None:
    write(tmp_path, {"a": A, "c": B}, {"a": A, "b": B})
    refused(tmp_path, "a is in both model-00001", "remove the file")


def test_truncated(tmp_path: Path) -> None:
    file = write(tmp_path, {"a": A, "b": B}) / "model.safetensors"
    whole = file.read_bytes()
    for size in (len(whole) - 1, len(whole) - 40):
        file.write_bytes(whole[:size])
        refused(
            tmp_path, f"{file} is truncated: it has {size} bytes", f"{len(whole)}", "fetch it again"
        )
    file.write_bytes(whole + b"x")
    refused(tmp_path, "bytes after its last tensor")


def test_corrupt_header(tmp_path: Path) -> None:
    file = write(tmp_path, {"a": A}) / "model.safetensors"
    whole = file.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])

    def with_header(change: dict[str, object]) -> bytes:
        text = json.dumps({**header, "a": {**header["a"], **change}}).encode()
        return len(text).to_bytes(8, "little") + text + A.numpy().tobytes()

    damaged = [
        b"",
        whole[:5],
        whole[:20],
        whole[:8] + b"\xff" + whole[9:],
        (2**62).to_bytes(8, "little") + whole[8:],
        with_header({"dtype": "F33"}),
        with_header({"shape": [3, 5]}),
        with_header({"data_offsets": [0]}),
    ]
    for content in damaged:
        file.write_bytes(content)
        refused(tmp_path, f"{file} has a corrupt header", "fetch the file again")


def test_git_lfs_pointer(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n"
    (tmp_path / "model.safetensors").write_text(text)
    refused(tmp_path, "git lfs pull")


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    write(tmp_path, {"a": A})
    monkeypatch.setattr(source, "StoredFile", fails)
    refused(tmp_path, "cannot read", "Input/output error")


def test_hub_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    refused(
        "nobody/no-model",
        "cannot fetch nobody/no-model from the Hugging Face Hub",
        "HF_HUB_OFFLINE",
    )


def test_hub_takes_what_belongs_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON first, then the files that the index names: a second copy of the weights stays there."""
    import huggingface_hub

    remote = write(tmp_path / "remote", {"a": A}, {"b": B})
    (remote / "consolidated.safetensors").write_bytes(b"much")
    local = tmp_path / "local"
    local.mkdir()
    asked: list[list[str]] = []

    def download(model_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (model_id, revision) == ("somebody/a-model", "v1")
        asked.append(sorted(allow_patterns))
        for pattern in allow_patterns:
            for file in remote.glob(pattern):
                shutil.copy(file, local)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert set(Checkpoint.open("somebody/a-model", Hub(revision="v1")).tensors) == {"a", "b"}
    assert asked == [["*.json"], [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]]


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/hostname", "sub/a.safetensors"]
)
def test_an_index_that_leads_elsewhere(tmp_path: Path, name: str) -> None:
    """It is refused before a byte of that file is read."""
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CheckpointError, match="which is not in its own directory"):
        Checkpoint.open(tmp_path)
