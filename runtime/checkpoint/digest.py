"""A digest of a checkpoint, by which ranks tell whether all of them read the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from shardwright.runtime.checkpoint.header import Entry
from shardwright.runtime.checkpoint.source import Checkpoint

BLOCK = 1024
"""Bytes that are read at a time."""

LEAST = 16
"""Blocks of each tensor: shorter tensors are read whole."""

STEP = 4 << 20
"""Bytes of a long tensor of which one block is read: one in 4,000 of the bytes."""


def digest_of_checkpoint(checkpoint: Checkpoint) -> str:
    """A digest of what the headers say, and of bytes from all over each tensor.

    A checkpoint that was trained further, or has a tensor of another one, has another digest. Two
    that differ in a few numbers of a long tensor may have the same.
    """
    found = sha256()
    for name, entry in sorted(checkpoint.tensors.items()):
        found.update(f"{name} {entry.dtype} {entry.shape} {entry.nbytes}\n".encode())
        file = checkpoint.files[entry.file]
        for start, count in _blocks(entry):
            found.update(file.bytes_at(file.data + entry.offset + start, count))
    return f"digest {found.hexdigest()[:12]}"


def _blocks(entry: Entry) -> Iterator[tuple[int, int]]:
    """Where to read how much of a tensor: evenly, with its begin and its end."""
    size = entry.nbytes
    if size <= LEAST * BLOCK:
        yield 0, size
        return
    count = max(LEAST, size // STEP)
    for i in range(count):
        yield i * (size - BLOCK) // (count - 1), BLOCK
