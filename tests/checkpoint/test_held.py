"""All that is read of a checkpoint is of one save; ranks tell checkpoints apart by their bytes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from benchmarks.faults.models import checkpoint as tiny
from shardwright.errors import CheckpointError
from shardwright.runtime.checkpoint import source
from shardwright.runtime.checkpoint.load import load_weights
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.model.build import empty_model
from tests.checkpoint.make import llama, llama_config, write

# --- one save


def saved(folder: Path) -> Path:
    llama().save_pretrained(folder)
    return folder


def loaded(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    model = empty_model(type(llama()), llama_config(), dtype=torch.float32)
    load_weights(model, checkpoint, {}, {}, dtype=dtype)
    return model.state_dict()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_another_save_in_place_of_an_open_one_is_not_read(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """Header, digest and numbers are of the old one; whether its numbers are mapped or copied."""
    file = saved(tmp_path) / "model.safetensors"
    want = load_file(file)
    checkpoint = Checkpoint.open(tmp_path)
    before = checkpoint.digest()
    save_file({n: t + 1 for n, t in want.items()}, tmp_path / "new", metadata={"format": "pt"})
    (tmp_path / "new").replace(file)
    assert checkpoint.digest() == before
    found = loaded(checkpoint, dtype)
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    assert Checkpoint.open(tmp_path).digest() != before


@pytest.mark.parametrize("how", ["written over", "cut off", "longer", "one byte"])
def test_a_save_into_an_open_file_is_noticed(tmp_path: Path, how: str) -> None:
    file = saved(tmp_path) / "model.safetensors"
    checkpoint = Checkpoint.open(tmp_path)
    whole = file.read_bytes()
    os.utime(file, ns=(0, 0))  # a clock that stands still would hide what follows
    checkpoint = Checkpoint.open(tmp_path)
    with file.open("r+b") as stream:
        if how == "written over":
            stream.write(whole[:8] + whole[8:])
        elif how == "cut off":
            stream.truncate(len(whole) // 2)
        elif how == "longer":
            stream.seek(0, os.SEEK_END)
            stream.write(b"more")
        else:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"\x01")
    with pytest.raises(CheckpointError, match=r"written into while|file is truncated"):
        loaded(checkpoint)


def test_files_that_are_replaced_while_they_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first would be of the old save, and the second of the new one."""
    write(tmp_path / "a", {"a": torch.zeros(3)}, {"b": torch.zeros(3)})
    write(tmp_path / "new", {"a": torch.ones(3)}, {"b": torch.ones(3)})
    read = source.read_header

    def saves_first(file: Any) -> Any:
        for new in (tmp_path / "new").glob("*.safetensors"):
            new.replace(tmp_path / "a" / new.name)
        return read(file)

    monkeypatch.setattr(source, "read_header", saves_first)
    with pytest.raises(CheckpointError, match="was saved anew while it was opened"):
        Checkpoint.open(tmp_path / "a")


def test_files_are_closed_with_the_checkpoint(tmp_path: Path) -> None:
    def count() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    write(tmp_path, {"a": torch.zeros(3)}, {"b": torch.zeros(3)})
    before = count()
    checkpoint = Checkpoint.open(tmp_path)
    assert count() == before + 2
    del checkpoint
    assert count() == before


# --- the digest


def test_another_value_of_any_tensor_is_another_digest(tmp_path: Path) -> None:
    """All of a tensor is other numbers, as where a head or a layer of another model is taken."""
    tensors = load_file(tiny(tmp_path / "model") / "model.safetensors")
    tensors |= {"long": torch.randn(300_000), "one": torch.ones(()), "flags": torch.ones(9).bool()}

    def digested(folder: str, other: dict[str, torch.Tensor]) -> str:
        return Checkpoint.open(write(tmp_path / folder, {**tensors, **other})).digest()

    want = digested("same", {})
    assert digested("again", {}) == want
    for name, tensor in tensors.items():
        other = ~tensor if tensor.dtype == torch.bool else tensor + 1
        assert digested(name, {name: other}) != want, name


@pytest.mark.parametrize("part", range(8))
def test_an_eighth_of_a_tensor_is_enough(tmp_path: Path, part: int) -> None:
    """One of several experts in one tensor, say; and one number of a short tensor."""
    whole = torch.randn(8, 20_000)
    found = set()
    for folder in ("whole", "other"):
        found.add(Checkpoint.open(write(tmp_path / folder, {"a": whole})).digest())
        whole[part] += 1
    assert len(found) == 2


def test_few_bytes_are_read_of_long_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SAMPLED", 1 << 16)
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.zeros(4 << 20), "b": torch.ones(5)}))
    read: list[int] = []
    file = next(iter(checkpoint.files.values()))
    at: Callable[[int, int], bytes] = file.bytes_at
    monkeypatch.setattr(
        file, "bytes_at", lambda start, count: (read.append(count), at(start, count))[1]
    )
    checkpoint.digest()
    assert 0 < sum(read) < 0.02 * checkpoint.nbytes


# --- headers

F32 = {"dtype": "F32", "shape": [2]}
TENSORS = {"a": {**F32, "data_offsets": [0, 8]}, "b": {**F32, "data_offsets": [8, 16]}}


def header(**other: Any) -> bytes:
    return json.dumps({**TENSORS, **other}).encode()


@pytest.mark.parametrize(
    "text, words",
    [
        (header(b={**F32, "data_offsets": [0, 8]}), "overlaps"),
        (header(b={**F32, "data_offsets": [4, 12]}), "overlaps"),
        (header(b={**F32, "data_offsets": [12, 20]}), "leaves a hole"),
        (header(a={**F32, "data_offsets": [8, 16]}), "leaves a hole"),
        (header(b={**F32, "data_offsets": [16, 8]}), "takes -8 bytes"),
        (header(b={**F32, "data_offsets": [8, 12]}), "takes 4 bytes but its shape takes 8"),
        (header(b={"dtype": "F64", "shape": [2], "data_offsets": [8, 16]}), "takes 16"),
        (header(b={"dtype": "F32", "shape": [True, 2], "data_offsets": [8, 16]}), "are not valid"),
        (header(b={"dtype": "F32", "shape": [2.0], "data_offsets": [8, 16]}), "are not valid"),
        (header(b={"dtype": "F32", "shape": [-2, -1], "data_offsets": [8, 16]}), "are not valid"),
        (header(b={"dtype": "F32", "shape": {"2": 2}, "data_offsets": [8, 16]}), "are not valid"),
        (header(b={**F32, "data_offsets": [8, 16, 24]}), "are not valid"),
        (header(__metadata__={"format": 1}), "__metadata__"),
        (header(__metadata__=["pt"]), "__metadata__"),
        (header(c={"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}), "overlaps"),
        (header(b={**F32, "data_offsets": [8, 2**64 + 16]}), "are not valid"),
        (header(b={**F32, "data_offsets": [False, 8]}), "are not valid"),
        (b"[]", "not a JSON object"),
        (header()[:-1] + b', "a": ' + json.dumps(TENSORS["a"]).encode() + b"}", "'a' twice"),
        (header() + b"x", "corrupt header"),
        (header() + b"\0\0", "corrupt header"),
    ],
)
def test_a_header_that_safetensors_refuses_is_refused(
    tmp_path: Path, text: bytes, words: str
) -> None:
    file = put(tmp_path, text)
    if words != "'a' twice":  # of which safetensors takes one
        with pytest.raises((SafetensorError, TypeError)), safe_open(file, "pt") as opened:
            opened.keys()
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint.open(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        header(),
        b" " + header() + b"   ",
        header(__metadata__={"format": "pt"}),
        header(c={"dtype": "F32", "shape": [0, 3], "data_offsets": [16, 16]}),
        header(c={"dtype": "F32", "shape": [0, 3], "data_offsets": [8, 8]}),
        header(c={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
        json.dumps(dict(reversed(TENSORS.items()))).encode(),
    ],
)
def test_a_header_that_safetensors_takes_is_taken(tmp_path: Path, text: bytes) -> None:
    with safe_open(put(tmp_path, text), "pt") as opened:
        names = set(opened.keys())
    assert set(Checkpoint.open(tmp_path).tensors) == names


def put(folder: Path, text: bytes) -> Path:
    file = folder / "model.safetensors"
    data = torch.arange(4, dtype=torch.float32).numpy().tobytes()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file
