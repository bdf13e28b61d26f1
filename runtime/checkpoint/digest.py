"""Computes a checkpoint digest, which ranks compare to see that all read the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from shardwright.runtime.checkpoint.header import Entry
from shardwright.runtime.checkpoint.source import Checkpoint

BLOCK = 1024
"""Bytes read at a time."""

LEAST = 16
"""Blocks read of each tensor at least; shorter tensors are read in full."""

STEP = 4 << 20
"""Bytes of a long tensor per block that is read: about one byte in 4,000."""


def digest_of_checkpoint(checkpoint: Checkpoint) -> str:
    """Return a digest of the headers and of bytes sampled from all over each tensor.

    Further training, or one tensor of another checkpoint, changes the digest. Two checkpoints that
    differ in only a few numbers of a long tensor may have the same digest.
    """
    found = sha256()
    for name, entry in sorted(checkpoint.tensors.items()):
        found.update(f"{name} {entry.dtype} {entry.shape} {entry.nbytes}\n".encode())
        file = checkpoint.files[entry.file]
        for start, count in _blocks(entry):
            found.update(file.bytes_at(file.data + entry.offset + start, count))
    return f"digest {found.hexdigest()[:12]}"


def _blocks(entry: Entry) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of the blocks to read: evenly spaced, first and last bytes included."""
    size = entry.nbytes
    if size <= LEAST * BLOCK:
        yield 0, size
        return
    count = max(LEAST, size // STEP)
    for i in range(count):
        yield i * (size - BLOCK) // (count - 1), BLOCK
