"""Reads this rank's part of each tensor directly into place.

A part is not read but mapped if it stays on the CPU in its stored dtype, and is one piece of a file
or a few large ones. As with transformers, pages are then read on first use and shared by the ranks
of one host. Writes to the tensor are private to the rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shardwright.errors import CheckpointError, PlanError
from shardwright.planner.contract.dims import Range, local_ranges, resolve
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.names import dtype_name, grouped
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.checkpoint.expressions import stored
from shardwright.runtime.checkpoint.header import Entry
from shardwright.runtime.checkpoint.memory import Room, Staging
from shardwright.runtime.checkpoint.names import Source
from shardwright.runtime.checkpoint.reader import Reader, boxes, inside
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.quantized.kept import KeptWeight

CASTABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Dtypes between which a cast keeps the meaning; 8-bit floats would need their scales."""

Ranges = Sequence[Sequence[Range]]
"""Per dimension, the ascending ranges of indices that a rank holds."""


@dataclass(frozen=True)
class Wanted:
    """A tensor to fill: a real local one, or a meta tensor of full or local shape."""

    source: Source
    tensor: torch.Tensor
    placement: Placement | None = None
    dtype: torch.dtype | None = None
    """Its own dtype, whatever the others are cast to."""


@dataclass(frozen=True)
class Report:
    """What loading did on this rank: tensors filled, bytes read and held, tensors skipped."""

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
    keep: bool = False,
) -> tuple[dict[str, torch.Tensor], Report]:
    """Fill each wanted tensor with the part that the rank at `coords` holds.

    Only those parts are read, a few MiB at a time, so peak memory is little above what the rank
    holds. On the CPU, a part in few pieces that needs no cast is mapped.

    Args:
        checkpoint: where the tensors are.
        wanted: model name -> its source, the tensor to fill and its placement.
        coords: this rank's coordinate on each mesh dim.
        device: where tensors on meta are made real.
        dtype: what floating tensors are cast to. None keeps the checkpoint's dtypes, and a
            parameter that is already real must then have the checkpoint's dtype. Real buffers
            keep the dtype that the model's code gave them, as in transformers.
        progress: show a bar on stderr if it is a terminal.
        keep: hold parameters on meta whose weights are quantized as they are stored.

    Returns:
        The filled tensors by model name, with new tensors for those on meta, and a report that
        counts mapped bytes as read.

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
                    if keep and target.is_meta:
                        kept = reader.kept(item.source, ranges, to)
                        if kept is not None:
                            out[name] = kept.to(room.device)
                            advance(entry.nbytes)
                            continue
                    mapped = None
                    if target.is_meta and on_cpu and to == entry.dtype:
                        mapped = reader.mapped(item.source, ranges)
                    if mapped is None:
                        target = room.take(_local(ranges), to) if target.is_meta else target
                        reader.fill(target, item.source, ranges)
                    out[name] = target if mapped is None else mapped
                    advance(entry.nbytes)
    staging.wait()
    room.trim()
    return out, Report(len(out), reader.read, sum(map(held_bytes, out.values())))


def held_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes."""
    return tensor.held_bytes if isinstance(tensor, KeptWeight) else tensor.nbytes


def matches(
    checkpoint: Checkpoint,
    source: Source,
    tensor: torch.Tensor,
    placement: Placement | None,
    coords: Coords,
) -> bool:
    """Return whether `tensor` equals this rank's part of `source`."""
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
    """Return the stored tensor's entry; for several tensors, the first's with the made shape.

    They share one dtype, since conversions move elements and do not cast.
    """
    if source.made is None:
        return checkpoint.tensors[source.key]
    first = checkpoint.tensors[next(stored(source.made))]
    return first._replace(shape=source.made.shape)


def _by_file(entries: Mapping[str, Entry]) -> list[list[str]]:
    """Group names by file, in the order in which their tensors are stored."""
    stored = sorted(entries, key=lambda n: (entries[n].file, entries[n].offset))
    return [*grouped((entries[name].file, name) for name in stored).values()]


def _ranges(name: str, item: Wanted, entry: Entry, coords: Coords) -> Ranges:
    """Return the index ranges that this rank holds. Raises if the placement does not fit."""
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
    """Return the shape of this rank's part."""
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
    """Return the dtype of the filled tensor."""
    stored, model = entry.dtype, item.tensor.dtype
    dtype = item.dtype or dtype
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
        f"{entry.file}: {item.source.key} is {dtype_name(stored)} and the model's {name} is "
        f"{dtype_name(model)}: {todo}"
    )


@contextmanager
def _bar(show: bool, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over bytes, if `show` is set and stderr is a terminal."""
    if not show or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
