"""Forms the process group under torchrun: all ranks are there within a time, or all raise an error.

Torch's own start waits a full timeout at each of its steps, even for ranks that have died. Here the
ranks first meet in the store, where each sees what the others were told and whether they still run.

Torchrun's agent keeps its store over `--max-restarts`. Torch alone would then connect to addresses
of ranks that have ended, and hang. Each start therefore prefixes its keys with a name that rank 0
draws. The other ranks ask for it under names that they draw themselves, so that they cannot read an
answer to an earlier rank.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import DistributedError
from shardwright.runtime.ranks import peers
from shardwright.runtime.ranks.failure import lost, named, noting_sockets, short
from shardwright.runtime.ranks.peers import ANSWER_SECONDS, Roll, bounded

IDLE = timedelta(days=1)
"""How long ranks may wait in users' own collectives, as those of an idle server do."""

_ours: Any = WeakIdKeyDictionary()
"""The default process group, if it was formed here -> the group for our own collectives."""


def form(backend: str, timeout: float) -> None:
    """Form the default process group of the ranks that torchrun started.

    Args:
        backend: "gloo" or "nccl".
        timeout: Seconds until all ranks must be there, and for each collective of `ours`. The
            default group, which is the user's, waits for `IDLE`.

    Raises:
        DistributedError: a rank died or did not come, or was told another number of ranks.
    """
    deadline = time.monotonic() + timeout
    rank, ranks = _number("RANK"), _number("WORLD_SIZE")
    try:
        store, roll, failure = bounded(
            lambda: _come(rank, ranks, deadline), timeout + 2 * ANSWER_SECONDS
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise DistributedError(
            f"starting failed on rank {rank}: nobody answers at {_address()} ({short(error)}): "
            "look at the output of rank 0, or give a longer `timeout`"
        ) from error
    if failure is not None:
        raise failure
    try:
        with noting_sockets():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=ranks, timeout=_left(deadline)
            )
            ours: Any = dist.new_group(timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:  # a stranger's bytes may be no number
        raise lost("starting", error, roll, range(ranks)) from error
    peers.remember(roll)
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    dist.group.WORLD.set_timeout(IDLE)
    _ours[dist.group.WORLD] = ours


def world() -> dist.ProcessGroup:
    """Return the group of all ranks for our collectives: `ours`, or else the user's default group.

    They fail if a rank hangs for longer than the timeout of `load`, also while users' broadcasts in
    the default group wait for the next request.
    """
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    return _ours.get(dist.group.WORLD, dist.group.WORLD)


def forget() -> None:
    """Drop the groups that are kept here."""
    _ours.clear()


def _come(
    rank: int, ranks: int, deadline: float
) -> tuple[dist.Store, Roll, DistributedError | None]:
    """Return this start's store and its roll, and an error if the ranks do not meet."""
    whole = _store(rank, deadline)
    name = uuid4().hex if rank == 0 else _asked(whole, rank, deadline)
    store = dist.PrefixStore(f"shardwright/{name}", whole)
    roll = Roll.enter(store, rank, ranks)
    return store, roll, _meet(roll, whole, name, deadline)


def _asked(store: dist.Store, rank: int, deadline: float) -> str:
    """Ask rank 0 for the name of this start.

    Raises:
        DistributedError: rank 0 does not answer.
    """
    mine = uuid4().hex
    for _ in _pauses():
        if store.check([f"shardwright/answer/{mine}"]):
            break
        store.set(f"shardwright/asks/{rank}", mine)  # again, in case a stranger wrote over it
        if time.monotonic() > deadline + ANSWER_SECONDS:  # rank 0 may have started a little later
            raise _absent(rank, [0])
    return store.get(f"shardwright/answer/{mine}").decode()


def _pauses() -> Iterator[None]:
    """Endless rounds of a loop, with longer and longer pauses between them."""
    pause = 0.01
    while True:
        yield
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _answer(store: dist.Store, name: str, ranks: Iterable[int]) -> None:
    """Tell the ranks that ask the name of this start. A rank that has ended does no harm."""
    for rank in ranks:
        if store.check([f"shardwright/asks/{rank}"]):
            asked = store.get(f"shardwright/asks/{rank}").decode(errors="replace")
            store.set(f"shardwright/answer/{asked}", name)


def _meet(roll: Roll, whole: dist.Store, name: str, deadline: float) -> DistributedError | None:
    """Wait until all ranks have entered the roll, and return an error if they do not.

    The outcome is settled once for all ranks, so that none waits for a rank that gave up.
    """
    for _ in _pauses():
        missing = roll.read(range(roll.ranks))
        if roll.rank == 0:
            _answer(whole, name, missing)
        told = {peer.ranks: rank for rank, peer in sorted(roll.peers.items(), reverse=True)}
        if len(told) > 1:
            words = (f"rank {rank} that there are {ranks}" for ranks, rank in sorted(told.items()))
            roll.leave()
            return DistributedError(
                f"the ranks were told different things: {', '.join(words)}: give all of them the "
                "same WORLD_SIZE"
            )
        out = roll.gone() or (missing if time.monotonic() > deadline else [])
        if (out or not missing) and (out := roll.settle("start", out)):
            roll.leave(out)
            return _absent(roll.rank, out)
        if not missing:
            break
    return None


def _absent(rank: int, missing: Sequence[int]) -> DistributedError:
    return DistributedError(
        f"starting failed on rank {rank}: {named(missing)} died or did not come in time: look at "
        f"the output of {named(missing)}, or give a longer `timeout`"
    )


def _store(rank: int, deadline: float) -> dist.Store:
    """Connect to the store of torchrun's agent or else of rank 0, without waiting for ranks."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = rank == 0 and not agents
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _number("MASTER_PORT")
    if not keeps:
        _await_port(host, port, deadline)
    return dist.TCPStore(
        host,
        port,
        is_master=keeps,
        timeout=_left(deadline),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _await_port(host: str, port: int, deadline: float) -> None:
    """Wait until the port is open; torch itself would log many lines while nobody listens."""
    while True:
        try:
            with socket.create_connection((host, port), _left(deadline).total_seconds()):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT')}"


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.1))


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise DistributedError(
            f"the environment's {variable} is '{text}', which is not a number: start the ranks "
            "with torchrun"
        )
    return int(text)
