"""Reads headers of safetensors files, with the same strict checks as safetensors itself."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwright.errors import CheckpointError
from shardwright.planner.contract.files import parse_json
from shardwright.runtime.checkpoint.mapped import StoredFile

MAX_HEADER = 100_000_000
"""Largest header in bytes, the limit of safetensors itself."""

NAMES = """
BOOL=bool U8=uint8 U16=uint16 U32=uint32 U64=uint64 I8=int8 I16=int16 I32=int32 I64=int64
F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2 F8_E4M3FNUZ=float8_e4m3fnuz F8_E8M0=float8_e8m0fnu
F8_E5M2FNUZ=float8_e5m2fnuz F16=float16 BF16=bfloat16 F32=float32 F64=float64 C64=complex64
"""
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype) for name, dtype in (pair.split("=") for pair in NAMES.split())
}
"""The safetensors name of each dtype -> the dtype."""


class Entry(NamedTuple):
    """One tensor of a checkpoint; `offset` is where its bytes begin in the file's data section."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Return the size of the full tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def read_header(file: StoredFile) -> dict[str, Entry]:
    """Read the tensors that a file's header lists.

    Checks that their bytes fill the file from the header to its end without overlap or hole, and
    that each has as many bytes as its shape and dtype take.

    Raises:
        CheckpointError: the header cannot be read, or does not describe the file.
    """
    try:
        length = int.from_bytes(file.bytes_at(0, 8), "little")
        text = file.bytes_at(8, length) if length <= min(file.size - 8, MAX_HEADER) else b""
    except OSError as error:
        raise CheckpointError(f"cannot read {file.path}: {error.strerror or error}") from None
    try:
        if not text:
            raise ValueError("its length does not fit the file")
        header: dict[str, Any] = parse_json(text, unique=True)
        if not isinstance(header, dict):
            raise ValueError("it is not a JSON object")
        _check_metadata(header.pop("__metadata__", None))
        tensors = {name: _entry(file.path, name, fields) for name, fields in header.items()}
        end = _end(tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        pointer = file.bytes_at(0, 40).startswith(b"version https://git-lfs")
        todo = "it is a Git LFS pointer: run `git lfs pull`" if pointer else "fetch the file again"
        raise CheckpointError(f"{file.path} has a corrupt header ({error}): {todo}") from None
    expected = 8 + length + end
    if file.size != expected:
        what = "is truncated" if file.size < expected else "has bytes after its last tensor"
        raise CheckpointError(
            f"{file.path} {what}: it has {file.size} bytes and its header describes {expected}: "
            "fetch it again"
        )
    return tensors


def _check_metadata(found: Any) -> None:
    texts = [*found.items()] if isinstance(found, dict) else None
    if found is not None and (texts is None or any(type(v) is not str for _, v in texts)):
        raise ValueError("its __metadata__ is not a map of texts")


def _entry(file: Path, name: str, fields: dict[str, Any]) -> Entry:
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype!r:.40}, which is not known here")
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not lists or any(type(n) is not int or not 0 <= n < 2**62 for n in (*shape, *offsets)):
        raise ValueError(f"the shape or data_offsets of {name} are not valid")
    entry = Entry(file, DTYPES[dtype], tuple(shape), offsets[0])
    if (takes := offsets[1] - offsets[0]) != entry.nbytes:
        raise ValueError(f"{name} takes {takes} bytes but its shape takes {entry.nbytes}")
    return entry


def _end(tensors: dict[str, Entry]) -> int:
    """Return where the last tensor ends. Raises if one does not begin where the previous ends."""
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            what = "overlaps" if entry.offset < end else "leaves a hole behind"
            raise ValueError(
                f"{name} begins at {entry.offset} and {what} the tensor before it, which ends at "
                f"{end}"
            )
        end += entry.nbytes
    return end
