"""A cheap digest of a checkpoint: that of two ranks differs where they would read other weights."""

from __future__ import annotations

from pathlib import Path

from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.communication.facts import digest

BLOCK = 4096
"""Bytes of each file that are compared, from its middle."""


def digest_of_checkpoint(checkpoint: Checkpoint) -> str:
    """A digest of what the headers say, and of some bytes of each file.

    Two checkpoints of one model differ in nothing else but values; of those, few are read here.
    """
    entries = (
        (name, entry.dtype, entry.shape, entry.file.name, entry.offset)
        for name, entry in sorted(checkpoint.tensors.items())
    )
    files = sorted({entry.file for entry in checkpoint.tensors.values()})
    return digest([*entries, *(_block(file) for file in files)])


def _block(file: Path) -> bytes:
    with file.open("rb") as stream:
        stream.seek(file.stat().st_size // 2)
        return stream.read(BLOCK)
