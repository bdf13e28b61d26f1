"""Tracks the other ranks as processes: where each runs, and which of them left first.

Each rank writes its host and process into the store of the process group. When a collective fails,
the first rank that notices checks which processes are gone, and writes the result into the store
before it leaves. Ranks that notice later, often because the first ones have left, read the result
there. All ranks therefore name the same missing ranks.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.errors import DistributedError

T = TypeVar("T")

ANSWER_SECONDS = 3.0
"""How long ranks that notice a failure wait for each other's answer if no process is gone."""


@dataclass(frozen=True)
class Peer:
    """A rank's process.

    Attributes:
        host: identifies the host; differs between containers.
        pid: process id.
        begun: start time, which tells the process from a later one with the same id.
        ranks: the number of ranks that the process was told.
    """

    host: str
    pid: int
    begun: str
    ranks: int

    @classmethod
    def this(cls, ranks: int) -> Peer:
        """Return the current process."""
        return cls(_host(), os.getpid(), _begun(os.getpid()), ranks)

    @property
    def gone(self) -> bool:
        """Return whether the process is known to have ended; never true for another host."""
        return self.host == _host() and _begun(self.pid) != self.begun


def _host() -> str:
    where = [socket.gethostname()]
    try:
        where.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        where.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:  # not Linux
        pass
    return " ".join(where)


def _begun(pid: int) -> str:
    """Return a process's start time in clock ticks; "" if it ended, "runs" without /proc."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "runs"


@dataclass
class Roll:
    """All ranks of a process group, by their entries in its store.

    Attributes:
        store: a store for this process group only, so that it has no entries of earlier ranks.
        rank: this rank.
        ranks: the number of ranks.
        peers: the entries read so far.
    """

    store: dist.Store
    rank: int
    ranks: int
    peers: dict[int, Peer] = field(default_factory=dict)

    @classmethod
    def enter(cls, store: dist.Store, rank: int, ranks: int) -> Roll:
        """Write this rank's entry."""
        store.set(_key("peer", rank), json.dumps(asdict(Peer.this(ranks))))
        return cls(store, rank, ranks)

    def read(self, among: Iterable[int]) -> list[int]:
        """Read the entries of ranks `among`, and return the ranks that have none yet."""
        missing = [rank for rank in among if rank not in self.peers]
        for rank in missing:
            if self.store.check([_key("peer", rank)]):
                self.peers[rank] = _read(self.store.get(_key("peer", rank)), Peer)
        return [rank for rank in missing if rank not in self.peers]

    def gone(self) -> list[int]:
        """Return the other ranks that are known to have ended."""
        return sorted(r for r, peer in self.peers.items() if r != self.rank and peer.gone)

    def missing(self, among: Sequence[int]) -> list[int]:
        """Return the ranks of a failed group that left first or do not answer.

        The result is the same on all ranks that ask. It is empty if all ranks are there and ask.
        """
        others = [r for r in among if r != self.rank]
        try:
            return bounded(lambda: self._ask(others), 4 * ANSWER_SECONDS)
        except (OSError, RuntimeError):  # the rank that keeps the store ended or hangs
            return [0] if self.rank else []

    def _ask(self, others: Collection[int]) -> list[int]:
        self._probe()
        self.read(range(self.ranks))
        self._say("asks")
        found = self._verdict(others)
        self.leave(found)
        return found

    def _verdict(self, others: Collection[int]) -> list[int]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            if self.store.check([_key("missing")]):
                return _read(self.store.get(_key("missing")), list[int])
            if gone := self.gone():
                return self.settle("missing", gone)
            silent = self._without("asks", others)
            if not silent:
                return []
            if time.monotonic() > deadline:
                return self.settle("missing", silent)
            time.sleep(0.05)

    def settle(self, word: str, ranks: Sequence[int]) -> list[int]:
        """Write which ranks are missing, or return what another rank wrote before."""
        return _read(self.store.compare_set(_key(word), "", json.dumps(ranks)), list[int])

    def leave(self, missing: Collection[int] = ()) -> None:
        """Say that this rank needs the store no more. Rank 0, which may keep the store, waits.

        It waits for all ranks that are neither `missing` nor gone, at most `ANSWER_SECONDS`.
        """
        self._say("knows")
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.rank == 0 and time.monotonic() < deadline:
            rest = {*range(1, self.ranks)} - {*missing, *self.gone()}
            if not self._without("knows", rest):
                return
            time.sleep(0.05)

    def _probe(self) -> None:
        """Raise an OSError if the store's server is gone; torch itself would log many lines."""
        store: Any = self.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            socket.create_connection((store.host, store.port), ANSWER_SECONDS).close()

    def _say(self, word: str) -> None:
        self.store.set(_key(word, self.rank), "")

    def _without(self, word: str, ranks: Iterable[int]) -> list[int]:
        return sorted(r for r in ranks if not self.store.check([_key(word, r)]))


def _read(text: bytes, kind: Any) -> Any:
    """Return what another rank wrote into the store, if it is a `kind`."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError:
        raise DistributedError(
            "the store in which the ranks meet holds what no rank has written: start all ranks "
            "with the same version of shardwright, in a network that nobody else can reach"
        ) from None


def _key(word: str, rank: int | None = None) -> str:
    return word if rank is None else f"{word}/{rank}"


def bounded(work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, run in a thread: torch waits forever for a store that hangs.

    Raises:
        TimeoutError: `work` takes longer than `seconds`; its thread goes on running.
    """
    out: Future[T] = Future()

    def run() -> None:
        try:
            out.set_result(work())
        except BaseException as error:
            out.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return out.result(seconds)
    except TimeoutError:
        raise TimeoutError("no answer in time") from None


_known: Any = WeakIdKeyDictionary()
"""The default process group -> its roll."""


def roll() -> Roll:
    """Return the roll of the default process group; the first call enters this rank in it."""
    world: Any = dist.group.WORLD
    if world not in _known:
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        # A store may outlive a group, and torchrun's agent keeps its store over restarts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        times = store.add(f"shardwright/{attempt}/{rank}", 1)
        own = dist.PrefixStore(f"shardwright/{attempt}.{times}", store)
        remember(Roll.enter(own, rank, dist.get_world_size()))
    return _known[world]


def remember(called: Roll) -> None:
    """Set `called` as the roll of the default process group."""
    _known[dist.group.WORLD] = called
