"""Read what one rank holds of each tensor, straight into place.

What is one piece of a file, or few large ones, and stays on the CPU as it is stored, is not read
at all: it is the mapped file itself, as with transformers. It is read when it is used, ranks of one
host share it, and what is written to it is the rank's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwright.errors import CheckpointError, PlanError
from shardwright.planner.contract.dims import Range, local_ranges, resolve
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.checkpoint.expressions import stored
from shardwright.runtime.checkpoint.header import Entry
from shardwright.runtime.checkpoint.memory import Room, Staging
from shardwright.runtime.checkpoint.names import Source
from shardwright.runtime.checkpoint.reader import Reader, boxes, inside
from shardwright.runtime.checkpoint.source import Checkpoint

CASTABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Dtypes between which a cast means the same number; 8-bit floats need their scales."""

Ranges = Sequence[Sequence[Range]]
"""Per dimension, the ascending ranges of indices that a rank holds."""


@dataclass(frozen=True)
class Wanted:
    """A tensor to fill: a local one, or one on meta (of whole or local shape) to be made real."""

    source: Source
    tensor: torch.Tensor
    placement: Placement | None = None


@dataclass(frozen=True)
class Report:
    """What loading did on this rank; sizes in bytes."""

    tensors: int
    read: int
    held: int
    unread: tuple[str, ...] = ()


def read_shards(
    checkpoint: Checkpoint,
    wanted: Mapping[str, Wanted],
    coords: Coords,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> tuple[dict[str, torch.Tensor], Report]:
    """Fill each wanted tensor with the part that the rank at `coords` holds.

    Nothing is read but those parts, a few MiB at a time, so that memory peaks little above what
    the rank holds. On the CPU, a part in few pieces and of the dtype that is wanted is mapped.

    Args:
        checkpoint: where the tensors are.
        wanted: model name -> where it comes from, the tensor to fill and how it is placed.
        coords: where this rank stands on each mesh dim.
        device: where tensors that are on meta are made real.
        dtype: what floating tensors are cast to; None keeps the checkpoint's dtypes, and a
            parameter that is already real must then have the checkpoint's. Buffers that are real
            keep the dtype that the model's code gave them, as transformers does.
        progress: show a bar on stderr if it is a terminal.

    Returns:
        The filled tensors by model name (new ones in place of those on meta), and the report, in
        which what is mapped counts as read.

    Raises:
        CheckpointError: a shape or dtype is not the one wanted, or a file cannot be read.
    """
    out: dict[str, torch.Tensor] = {}
    entries = {name: _entry(checkpoint, w.source) for name, w in wanted.items()}
    room, staging = Room(torch.device(device)), Staging(torch.device(device))
    reader = Reader(checkpoint, staging.copy)
    on_cpu = room.device.type == "cpu"
    with _bar(progress, sum(e.nbytes for e in entries.values())) as advance:
        for names in _by_file(entries):
            with reader:
                for name in names:
                    item, entry = wanted[name], entries[name]
                    ranges = _ranges(name, item, entry, coords)
                    _check_shape(name, item, entry, ranges)
                    to, target = _dtype(name, item, entry, dtype), item.tensor
                    mapped = None
                    if target.is_meta and on_cpu and to == entry.dtype:
                        mapped = reader.mapped(item.source, ranges)
                    if mapped is None:
                        target = room.take(_local(ranges), to) if target.is_meta else target
                        _fill(target, reader, item.source, entry, ranges)
                    out[name] = target if mapped is None else mapped
                    advance(entry.nbytes)
    staging.wait()
    room.trim()
    return out, Report(len(out), reader.read, sum(tensor.nbytes for tensor in out.values()))


def matches(
    checkpoint: Checkpoint,
    source: Source,
    tensor: torch.Tensor,
    placement: Placement | None,
    coords: Coords,
) -> bool:
    """Whether `tensor` already is what this rank holds of `source`."""
    entry = _entry(checkpoint, source)
    try:
        ranges = _ranges(source.key, Wanted(source, tensor, placement), entry, coords)
    except CheckpointError:
        return False
    with Reader(checkpoint) as reader:
        return all(
            torch.equal(
                reader.get(source, box).to(tensor.device, tensor.dtype), tensor[inside(box)]
            )
            for box in boxes(ranges, entry.dtype.itemsize)
        )


def _entry(checkpoint: Checkpoint, source: Source) -> Entry:
    """The stored tensor; of one that is made of several, as if it lay where the first of them is.

    All of them have one dtype: conversions move elements and do not cast.
    """
    if source.made is None:
        return checkpoint.tensors[source.key]
    first = checkpoint.tensors[next(stored(source.made))]
    return first._replace(shape=source.made.shape)


def _by_file(entries: Mapping[str, Entry]) -> list[list[str]]:
    """Names for each file, in the order in which their tensors lie there."""
    out: dict[Path, list[str]] = {}
    for name in sorted(entries, key=lambda n: (entries[n].file, entries[n].offset)):
        out.setdefault(entries[name].file, []).append(name)
    return list(out.values())


def _ranges(name: str, item: Wanted, entry: Entry, coords: Coords) -> Ranges:
    """What this rank holds of each dimension, if the tensor may be placed as is wanted."""
    if item.placement is None:
        return [[(0, size)] for size in entry.shape]
    try:
        if len(item.placement.dims) != len(entry.shape):
            raise PlanError("")
        dims = [resolve(d, n) for d, n in zip(item.placement.dims, entry.shape, strict=True)]
    except PlanError:
        raise CheckpointError(
            f"{entry.file}: {item.source.key} has shape {list(entry.shape)}, but {name} "
            f"is laid out as '{item.placement}': use the config that belongs to this checkpoint"
        ) from None
    return [local_ranges(dim, coords) for dim in dims]


def _local(ranges: Ranges) -> list[int]:
    """The shape of what this rank holds."""
    return [sum(stop - start for start, stop in dim) for dim in ranges]


def _check_shape(name: str, item: Wanted, entry: Entry, ranges: Ranges) -> None:
    tensor, local = item.tensor, _local(ranges)
    if [*tensor.shape] != local and not (tensor.is_meta and tensor.shape == entry.shape):
        raise CheckpointError(
            f"{entry.file}: {item.source.key} has shape {list(entry.shape)}, of which this rank "
            f"holds {local}, but the model's {name} has {list(tensor.shape)}: use the config "
            "that belongs to this checkpoint"
        )


def _dtype(name: str, item: Wanted, entry: Entry, dtype: torch.dtype | None) -> torch.dtype:
    """What dtype the filled tensor has."""
    stored, model = entry.dtype, item.tensor.dtype
    stated = not item.tensor.is_meta and not isinstance(item.tensor, torch.nn.Parameter)
    if not item.tensor.is_meta:
        to = model
    else:
        to = stored if dtype is None or not stored.is_floating_point else dtype
    kept = all(a == to or {a, to} <= CASTABLE for a in (stored, model))
    if kept and (to == stored or stated or dtype is not None):
        return to
    todo = (
        "build the model in the checkpoint's dtype, or ask for a dtype to cast to"
        if kept
        else "no cast between them keeps the values, use the config that belongs to this checkpoint"
    )
    raise CheckpointError(
        f"{entry.file}: {item.source.key} is {_short(stored)} and the model's {name} is "
        f"{_short(model)}: {todo}"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def _fill(
    target: torch.Tensor, reader: Reader, source: Source, entry: Entry, ranges: Ranges
) -> None:
    """Copy this rank's part of `source` into `target`."""
    for box in boxes(ranges, entry.dtype.itemsize):
        reader.fill(target, source, box)


@contextmanager
def _bar(show: bool, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over bytes; silent unless asked for and on a terminal."""
    if not show or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
