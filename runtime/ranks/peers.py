"""The other ranks as processes: where each runs, and which of them left first.

Each rank writes its host and process into the store of the process group. When a collective fails,
whoever sees it looks which process is gone, and writes that down before it leaves itself. Ranks
that notice later, often because the first to notice have left, read it there: all name the same.
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
"""How long ranks that notice a failure wait for each other's answer, where no process is gone."""


@dataclass(frozen=True)
class Peer:
    """A rank as a process: `host` also tells containers apart, `begun` a process from a later one.

    `ranks` is how many ranks it was told that there are.
    """

    host: str
    pid: int
    begun: str
    ranks: int

    @classmethod
    def this(cls, ranks: int) -> Peer:
        """The process that asks."""
        return cls(_host(), os.getpid(), _begun(os.getpid()), ranks)

    @property
    def gone(self) -> bool:
        """Whether it is known to have ended; of another host nothing is known."""
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
    """When a process began, in clock ticks; "" where it has ended, "runs" where nobody can tell."""
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
    """All ranks of a process group by their entries in its store.

    Attributes:
        store: for this process group alone, so that no entry is of ranks that ended before.
        rank: this one.
        ranks: how many there are.
        peers: the entries that were read so far.
    """

    store: dist.Store
    rank: int
    ranks: int
    peers: dict[int, Peer] = field(default_factory=dict)

    @classmethod
    def enter(cls, store: dist.Store, rank: int, ranks: int) -> Roll:
        """Write down where this rank runs."""
        store.set(_key("peer", rank), json.dumps(asdict(Peer.this(ranks))))
        return cls(store, rank, ranks)

    def read(self, among: Iterable[int]) -> list[int]:
        """Read the entries of ranks that are there; those of `among` that have none yet."""
        missing = [rank for rank in among if rank not in self.peers]
        for rank in missing:
            if self.store.check([_key("peer", rank)]):
                self.peers[rank] = _read(self.store.get(_key("peer", rank)), Peer)
        return [rank for rank in missing if rank not in self.peers]

    def gone(self) -> list[int]:
        """Other ranks that are known to have ended."""
        return sorted(r for r, peer in self.peers.items() if r != self.rank and peer.gone)

    def missing(self, among: Sequence[int]) -> list[int]:
        """Of a group whose collective failed: the ranks that left first, or do not answer.

        The same on all ranks that ask. None where all of them are there and ask too.
        """
        others = [r for r in among if r != self.rank]
        try:
            return bounded(lambda: self._ask(others), 4 * ANSWER_SECONDS)
        except (OSError, RuntimeError):  # the rank that keeps the store has ended, or hangs
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
        """Write down which ranks are missing, or read what another rank has written before."""
        return _read(self.store.compare_set(_key(word), "", json.dumps(ranks)), list[int])

    def leave(self, missing: Collection[int] = ()) -> None:
        """Say that this rank has read all that it wants; rank 0 may keep the store, and waits.

        It waits for all but those that are `missing`, or gone.
        """
        self._say("knows")
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.rank == 0 and time.monotonic() < deadline:
            rest = {*range(1, self.ranks)} - {*missing, *self.gone()}
            if not self._without("knows", rest):
                return
            time.sleep(0.05)

    def _probe(self) -> None:
        """Raise an OSError if nobody keeps the store any more: torch would fill the screen."""
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
    """What another rank wrote into the store, if it is a `kind`."""
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
    """What `work` gives, in a thread of its own: torch waits without end for a store that hangs.

    Raises:
        TimeoutError: it takes longer than that; it is left alone.
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
    """The roll of the default process group; this rank enters it when it is first asked for."""
    world: Any = dist.group.WORLD
    if world not in _known:
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        # A store may outlive a group, and torchrun's agent keeps its own over restarts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        times = store.add(f"shardwright/{attempt}/{rank}", 1)
        own = dist.PrefixStore(f"shardwright/{attempt}.{times}", store)
        remember(Roll.enter(own, rank, dist.get_world_size()))
    return _known[world]


def remember(called: Roll) -> None:
    """Let `called` be the roll of the default process group."""
    _known[dist.group.WORLD] = called
