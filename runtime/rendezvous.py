"""The start of a process group under torchrun: all ranks are there within a time, or an error is.

Torch's own start waits a full timeout at each of its steps, and for ranks that have died. So the
ranks meet in its store first, where each sees what the others were told and whether they still run.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from shardwright.errors import DistributedError
from shardwright.runtime import connections, peers
from shardwright.runtime.failure import lost, named, short
from shardwright.runtime.peers import ANSWER_SECONDS, Roll, bounded


def form(backend: str, timeout: float) -> None:
    """Form the default process group of the ranks that torchrun started.

    Args:
        backend: "gloo" or "nccl".
        timeout: Seconds until all ranks must have come, and for each collective afterwards.

    Raises:
        DistributedError: a rank died or did not come, or was told another number of ranks.
    """
    deadline = time.monotonic() + timeout
    rank, ranks = _number("RANK"), _number("WORLD_SIZE")
    try:
        store, roll, failure = bounded(
            lambda: _come(rank, ranks, deadline), timeout + 2 * ANSWER_SECONDS
        )
    except (OSError, RuntimeError) as error:
        raise DistributedError(
            f"starting failed on rank {rank}: nobody answers at {_address()} ({short(error)}): "
            "look at the output of rank 0, or give a longer `timeout`"
        ) from error
    if failure is not None:
        raise failure
    try:
        with connections.noted():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=ranks, timeout=_left(deadline)
            )
    except RuntimeError as error:
        raise lost("starting", error, roll, range(ranks)) from error
    peers.remember(roll)
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    dist.group.WORLD.set_timeout(timedelta(seconds=timeout))


def _come(
    rank: int, ranks: int, deadline: float
) -> tuple[dist.Store, Roll, DistributedError | None]:
    store = _store(rank, deadline)
    roll = Roll.enter(store, rank, ranks)
    return store, roll, _meet(roll, deadline)


def _meet(roll: Roll, deadline: float) -> DistributedError | None:
    """Wait until all ranks have entered the roll; what is wrong if they do not.

    Whether to go on is settled once, for all ranks: none is left waiting for one that gave up.
    """
    pause = 0.01
    while True:
        missing = roll.read(range(roll.ranks))
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
            return DistributedError(
                f"starting failed on rank {roll.rank}: {named(out)} died or did not come in time: "
                f"look at the output of {named(out)}, or give a longer `timeout`"
            )
        if not missing:
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _store(rank: int, deadline: float) -> dist.Store:
    """The store that torchrun's agent keeps, else rank 0; none waits here for other ranks."""
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
    """Wait until somebody listens: torch would fill the screen where nobody comes to."""
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
