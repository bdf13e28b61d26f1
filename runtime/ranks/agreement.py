"""Checks that all ranks succeed at a common step and have the same inputs, or fails on all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import isclose, isnan
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from shardwright.errors import CheckpointError, DistributedError
from shardwright.runtime.ranks import peers
from shardwright.runtime.ranks.failure import failed
from shardwright.runtime.ranks.rendezvous import world

T = TypeVar("T")

Facts = Mapping[str, str]
"""What is compared -> this rank's value, as a short text or a digest."""

Numbers = Mapping[str, list[float]]
"""Name of a tensor -> some of this rank's numbers in it."""

CLOSE = 1e-3
"""Ranks on other processors round otherwise. Random numbers are further apart."""

AT_ONCE = 2048
"""Bytes of a message that are sent together with its length."""

LENGTH = 8
"""Bytes of the length field."""

MAX_MESSAGE = 1 << 24
"""Most bytes of a rank's message."""


class _Answer(NamedTuple):
    """What one rank tells the others."""

    rank: int
    facts: dict[str, str]
    numbers: dict[str, list[float]]
    failure: str | None
    damaged: bool


def agree(
    what: str,
    failure: Exception | None = None,
    facts: Facts | None = None,
    groups: Sequence[dist.ProcessGroup] | None = None,
    numbers: Numbers | None = None,
) -> None:
    """Compare failures and facts across ranks. All of them must call this.

    Args:
        what: what was done, for messages: "saving".
        failure: this rank's failure.
        facts: values that must be equal on all ranks.
        groups: the groups of mesh dims that together span the calling ranks. The default is all
            ranks, or only this one if there is no process group.
        numbers: numbers that must be equal on all ranks, but for rounding.

    Raises:
        Exception: `failure` itself, if given.
        CheckpointError: another rank failed with one; the message quotes it.
        DistributedError: another rank failed otherwise or died, or facts or numbers differ.
    """
    if groups is None:
        groups = [world()] if dist.is_available() and dist.is_initialized() else []
    for group in groups:  # a failure found in one group is passed on to the next
        mine = _Answer(
            dist.get_rank(),
            dict(facts or {}),
            dict(numbers or {}),
            None if failure is None else str(failure),
            isinstance(failure, CheckpointError),
        )
        everyone = gather(what, mine, group, _Answer)
        failure = failure or _failure(what, everyone) or _difference(everyone)
    if failure is not None:
        raise failure


def gather(what: str, mine: Any, group: dist.ProcessGroup, kind: Any) -> list[Any]:
    """Return what each rank of `group` passes as `mine`.

    Values travel as JSON and are validated against `kind`, so a message from a stranger cannot run
    code.

    Args:
        what: What the ranks do, for messages; the same on all ranks.
        mine: A small value that JSON can hold.
        group: The ranks, all of which must call this.
        kind: The type of the value that each rank passes; NamedTuples are restored.

    Raises:
        DistributedError: a rank died, did not come, did something else, or sent an invalid message.
    """
    roll = peers.roll()
    text = json.dumps(mine, default=repr)
    try:
        everyone = _exchanged(f"{what}\n{text}".encode(), group)
    except RuntimeError as error:
        raise failed(what, error, group) from error
    ranks = dist.get_process_group_ranks(group)
    roll.read(ranks)  # all ranks have written their entries by now
    named = {rank: told.partition(b"\n")[0] for rank, told in zip(ranks, everyone, strict=True)}
    for rank, name in named.items():
        if name != named[ranks[0]]:
            first, other = (ascii(n.decode(errors="replace")[:60]) for n in (named[ranks[0]], name))
            raise DistributedError(
                f"the ranks do different things: rank {ranks[0]} is at {first}, rank {rank} at "
                f"{other}: let all ranks make the same calls in the same order"
            )
    return [_read(what, rank, told, kind) for rank, told in zip(ranks, everyone, strict=True)]


def first_reason(what: str, mine: str | None, group: dist.ProcessGroup) -> str | None:
    """Return the first text that a rank of `group` passes; None if all pass None."""
    return next(filter(None, gather(what, mine, group, str | None)), None)


def _read(what: str, rank: int, told: bytes, kind: Any) -> Any:
    """Return the value in a rank's message, if it is a `kind`."""
    try:
        return _reader(kind).validate_json(told.partition(b"\n")[2])
    except ValidationError:
        raise DistributedError(
            f"{what} failed: rank {rank} sent a message that cannot be read: start all ranks with "
            "the same version of shardwright, in a network that nobody else can reach"
        ) from None


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _exchanged(told: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Exchange messages, mostly in one collective; `all_gather_object` needs two."""
    begun = _all_gathered(
        len(told).to_bytes(LENGTH, "little") + told[:AT_ONCE].ljust(AT_ONCE), group
    )
    lengths = [int.from_bytes(text[:LENGTH], "little") for text in begun]
    if max(lengths) > MAX_MESSAGE:
        raise RuntimeError("a rank announced a message that is too long")
    if (rest := max(lengths) - AT_ONCE) > 0:
        ends = _all_gathered(told[AT_ONCE:].ljust(rest), group)
        begun = [start + end for start, end in zip(begun, ends, strict=True)]
    return [text[LENGTH : LENGTH + length] for text, length in zip(begun, lengths, strict=True)]


def _all_gathered(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return the bytes of each rank of `group`, equally many on each."""
    device = dist.distributed_c10d._get_object_coll_device(group)
    part = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    whole = part.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather(list(whole.unbind()), part, group)
    return [row.tobytes() for row in whole.cpu().numpy()]


def tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `work`, or its failure, of which the other ranks are to hear first."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def _failure(what: str, everyone: Sequence[_Answer]) -> Exception | None:
    for answer in everyone:
        if answer.failure is not None:
            kind = CheckpointError if answer.damaged else DistributedError
            return kind(f"{what} failed on rank {answer.rank}: {answer.failure}")
    return None


def _difference(everyone: Sequence[_Answer]) -> DistributedError | None:
    first = everyone[0]
    for answer in everyone:
        for name in {**first.facts, **answer.facts}:  # facts that determine others come first
            mine, other = first.facts.get(name, "none"), answer.facts.get(name, "none")
            if mine != other:
                return DistributedError(
                    f"the ranks do not have the same {name}: rank {first.rank} has {mine}, rank "
                    f"{answer.rank} has {other}: give all ranks the same"
                )
        for name in {**first.numbers, **answer.numbers}:
            if not _are_close(first.numbers.get(name, []), answer.numbers.get(name, [])):
                return DistributedError(
                    f"ranks {first.rank} and {answer.rank} have different numbers in '{name}': if "
                    "code draws them when the model is built, call torch.manual_seed alike on all "
                    "ranks before that"
                )
    return None


def _are_close(some: list[float], others: list[float]) -> bool:
    largest = max((abs(x) for x in some if abs(x) < float("inf")), default=0.0)
    return len(some) == len(others) and all(
        isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE * largest) or (isnan(a) and isnan(b))
        for a, b in zip(some, others, strict=True)
    )
