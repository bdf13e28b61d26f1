"""Device profiles as JSON files: the speed of a device and of the links between ranks.

A collective takes a latency plus bytes over a speed, by kind. The speed is the "bus bandwidth" of
nccl-tests, what one rank sends (or receives) each second when all do: a ring over n ranks sends
2(n-1)/n of an all-reduce's bytes, (n-1)/n of a reduce-scatter's and n-1 times a rank's input of an
all-gather (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005). In an all-to-all each rank sends (n-1)/n of its input, too; its latency and speed are
taken to be those of a reduce-scatter. The latency does not depend on the number of ranks. All
figures are integers.

Ranks on several hosts make one ring, in which each device of a host has its own way out, or go by
levels: within the hosts, and between them on what is left of the bytes. The cheaper one counts, but
for backends that only make rings. In an all-to-all each device sends to all others by itself.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwright import plugins
from shardwright.errors import UsageError
from shardwright.planner.contract.files import read_json
from shardwright.planner.contract.plan_figures import Way

FOLDER = Path(__file__).parent
SECOND = 10**9


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Link(_Part):
    """Start-up time and speed of one kind of collective."""

    latency_ns: int = Field(ge=0)
    bytes_per_s: int = Field(gt=0)


class Links(_Part):
    """Each kind of collective that plans use."""

    all_reduce: Link
    all_gather: Link
    reduce_scatter: Link
    all_to_all: Link | None = Field(default=None, description="left out: as reduce_scatter")


class Hosts(Link):
    """How many devices a host has, and what each can send to other hosts while all others do."""

    devices: int = Field(gt=0)
    levels: bool = Field(
        default=True, description="whether collectives may go by levels, too, as in NCCL"
    )


class Flops(_Part):
    """Floating-point operations a second in matrix products, by dtype."""

    bfloat16: int = Field(gt=0)
    float16: int = Field(gt=0)
    float32: int = Field(gt=0)
    float64: int = Field(gt=0)


class Device(_Part):
    """One device of a rank, and its links to those of the others."""

    source: str = Field(min_length=1, description="where the figures come from")
    memory_bytes: int = Field(gt=0)
    memory_bytes_per_s: int = Field(gt=0)
    flops_per_s: Flops
    kernel_ns: int = Field(
        default=0, ge=0, description="what an op takes besides its arithmetic or memory traffic"
    )
    host_wait_ns: int = Field(
        default=0, ge=0, description="what it takes besides that the host waits for a value"
    )
    links: Links
    peer_links: bool = Field(
        default=False,
        description="each pair of devices has a link of its own, of the speed in `links`: "
        "n ranks use n-1 of them at once; otherwise `links` has what a device can do in all",
    )
    hosts: Hosts | None = Field(default=None, description="left out: all ranks are on one host")

    def collective(self, kind: str, size: int, ranks: int, hosts: int = 1) -> int:
        """Return the nanoseconds of a collective.

        Args:
            kind: A field of `Links`.
            size: Input bytes on each rank.
            ranks: How many ranks take part.
            hosts: How many hosts they are on.
        """
        if hosts == 1 or ranks < 2:
            return self._within(kind, size, ranks)
        ways = self._ways(kind, size, ranks, hosts)
        return min(ways.values())

    def way(self, kind: str, size: int, ranks: int, hosts: int = 1) -> Way:
        """Return how a collective is cheaper; the arguments are those of `collective`."""
        if hosts == 1 or ranks < 2:
            return ""
        ways = self._ways(kind, size, ranks, hosts)
        return min(ways, key=ways.__getitem__)

    def _ways(self, kind: str, size: int, ranks: int, hosts: int) -> dict[Way, int]:
        """Return the nanoseconds of a collective over several hosts, by the way that it goes."""
        assert self.hosts is not None, "a mesh over several hosts needs a profile with hosts"
        if kind == "all_to_all":
            return {"": self.directly(size, ranks, hosts)}
        ways: dict[Way, int] = {"ring": self.ring(kind, size, ranks, hosts)}
        if self.hosts.levels:
            ways["levels"] = self.by_levels(kind, size, ranks, hosts)
        return ways

    def _within(self, kind: str, size: int, ranks: int, near: int | None = None) -> int:
        """Return the nanoseconds of a collective over the links within a host.

        `near` is how many of the ranks are on one host, by default all.
        """
        if ranks < 2:
            return 0
        link: Link = getattr(self.links, kind) or self.links.reduce_scatter
        links = (near or ranks) - 1 if self.peer_links else 1
        return link.latency_ns + _ceil(
            sent(kind, size, ranks) * SECOND, links * link.bytes_per_s * ranks
        )

    def _between(self, kind: str, size: int, ranks: int, near: int = 1) -> int:
        """Return the nanoseconds of a collective over the links between hosts.

        `near` is how many devices of each host share the traffic.
        """
        assert self.hosts is not None, "a mesh over several hosts needs a profile with hosts"
        speed = self.hosts.bytes_per_s * near * ranks
        return self.hosts.latency_ns + _ceil(sent(kind, size, ranks) * SECOND, speed)

    def ring(self, kind: str, size: int, ranks: int, hosts: int) -> int:
        """Return the nanoseconds of one ring through all ranks on several hosts."""
        near = max(ranks // hosts, 1)
        within = self._within(kind, size, ranks, near) if near > 1 else 0
        return max(within, self._between(kind, size, ranks, near))

    def by_levels(self, kind: str, size: int, ranks: int, hosts: int) -> int:
        """Return the nanoseconds of a collective within each host, and between hosts.

        An all-reduce is reduce-scattered within hosts, all-reduced between them, and all-gathered.
        """
        inside = _ceil(ranks, hosts)
        if kind == "all_gather":
            within = self._within(kind, size * hosts, inside)
            return self._between(kind, size, hosts) + within
        part = _ceil(size, inside)
        within = self._within("reduce_scatter", size, inside)
        if kind == "all_reduce":
            within += self._within("all_gather", part, inside)
        return within + self._between(kind, part, hosts)

    def directly(self, size: int, ranks: int, hosts: int) -> int:
        """Return the nanoseconds of an all-to-all over several hosts.

        What a device sends to those of other hosts all takes its own way out, and what it sends to
        those of its host goes at the same time.
        """
        assert self.hosts is not None, "a mesh over several hosts needs a profile with hosts"
        near = max(ranks // hosts, 1)
        within = self._within("all_to_all", _ceil(size * near, ranks), near)
        out = _ceil(size * (ranks - near) * SECOND, self.hosts.bytes_per_s * ranks)
        return max(within, self.hosts.latency_ns + out)

    def compute(self, flops: int, traffic: int, dtype: str, kernels: int) -> int:
        """Return an op's nanoseconds: the longer of arithmetic and memory traffic (roofline).

        What its kernels take besides is added.
        """
        speed = getattr(self.flops_per_s, dtype, self.flops_per_s.float32)
        arithmetic, moving = flops * SECOND, traffic * SECOND
        longer = max(_ceil(arithmetic, speed), _ceil(moving, self.memory_bytes_per_s))
        return longer + kernels * self.kernel_ns


def sent(kind: str, size: int, ranks: int) -> int:
    """Return the bytes that a rank sends in a collective, times the ranks to get an integer."""
    factor = {"all_reduce": 2, "all_gather": ranks, "reduce_scatter": 1, "all_to_all": 1}[kind]
    return factor * (ranks - 1) * size


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def names() -> list[str]:
    """Return the names of Shardwright's profiles and of other packages' profiles."""
    return sorted({*_own(), *plugins.names("devices")})


def device(name: str) -> Device:
    """Return the profile of that name, or from the file of that name, which ends in .json.

    A profile of another package is a JSON file or its content, in the entry-point group
    `shardwright.devices`.

    Raises:
        UsageError: there is no such profile, or it is invalid; the message says where.
        PluginError: another package's profile does not load.
    """
    if name.endswith(".json"):
        return read(Path(name))
    if name in _own():
        return _own()[name]
    found = plugins.load("devices", name)
    if found is None:
        raise UsageError(
            f"unknown device '{name}'; known: {', '.join(names())}, "
            "or a file profile.json as `shardwright calibrate` writes it"
        )
    return read(Path(found)) if isinstance(found, str | Path) else checked(found, name)


def ranks_on_a_host(name: str, ranks: int, asked: int | None = None) -> int | None:
    """Return how many of some ranks are on one host; None if all are.

    Args:
        name: Name of the device profile.
        ranks: All ranks.
        asked: Ranks on a host, by default as many as the profile has.

    Raises:
        UsageError: the profile is unknown, or has no links between hosts and several are needed.
    """
    if asked is not None and asked < 1:
        raise UsageError(f"gpus_per_host must be at least 1, not {asked}")
    hosts = device(name).hosts
    on_one = asked or (hosts.devices if hosts else ranks)
    if ranks <= on_one:
        return None
    if hosts is None:
        raise UsageError(
            f"{ranks} ranks are on several hosts, with {on_one} on each, and device profile "
            f'\'{name}\' has no links between hosts: add "hosts" to it, with "devices" of a '
            'host, "latency_ns" and "bytes_per_s"'
        )
    return on_one


@cache
def _own() -> dict[str, Device]:
    return {path.stem: read(path) for path in FOLDER.glob("*.json")}


def read(path: Path) -> Device:
    """Read a profile from a file.

    Raises:
        UsageError: the file is missing or is not a profile.
    """
    try:
        data: Any = read_json(path)
    except OSError as error:
        raise UsageError(f"cannot read device profile {path}: {error.strerror}") from None
    except ValueError as error:  # not text, or not JSON
        raise UsageError(f"device profile {path} is not JSON: {error}") from None
    return checked(data, str(path))


def checked(data: Any, where: str) -> Device:
    """Validate `data` as a profile.

    Raises:
        UsageError: it is not a profile.
    """
    try:
        return Device.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the profile"
        raise UsageError(f"device profile {where} is not valid: {place}: {first['msg']}") from None
