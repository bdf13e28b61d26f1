"""Reads what nccl-tests printed (`all_reduce_perf`, …) into the links of a device profile.

A run on one host gives the link of its kind of collective. A run over several hosts gives the way
out of a host: a ring has one way out for each of a host's devices, so one device's is that share of
the measured speed. If the links within a host are the slower ones, it is at least that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shardwright.errors import UsageError
from shardwright.planner.devices.device import Device, Hosts, Link
from shardwright.planner.devices.fit import link

TESTS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
"""Name of a test -> the field of `Links`."""

TEST = re.compile(rf"({'|'.join(TESTS)})_perf")
RANK = re.compile(r"#\s+Rank\s+\d+ .*\bon\s+(\S+)\s+device")
COLUMNS = 12
"""Least columns of a row: size, count, type, op, and time, two speeds and errors twice."""


class Measured(NamedTuple):
    """A run of nccl-tests: (input bytes on each rank, nanoseconds) by size."""

    kind: str
    ranks: int
    hosts: int
    points: list[tuple[int, int]]


def read(path: Path) -> Measured:
    """Return what a file with the output of nccl-tests says.

    The test is named in the output, as new versions do, or in the name of the file.

    Raises:
        UsageError: the file cannot be read, is no such output, or does not say which test it is.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    hosts = RANK.findall(text)
    if len(hosts) < 2:
        raise UsageError(f"{path} has no list of two ranks or more, as nccl-tests prints it")
    named = TEST.search(text) or re.search("|".join(TESTS), path.name)
    if named is None:
        raise UsageError(
            f"{path} does not say which collective was measured: put it in the name of the file, "
            f"for example all_reduce.txt; known: {', '.join(TESTS)}"
        )
    kind = TESTS[named[0].removesuffix("_perf")]
    ranks = len(hosts)
    shared = ranks if kind == "all_gather" else 1  # its size is that of the result
    rows = [row.split() for row in text.splitlines() if row.strip()[:1].isdigit()]
    points = [
        (int(row[0]) // shared, round(float(row[-8]) * 1000))
        for row in rows
        if len(row) >= COLUMNS and int(row[0]) >= shared
    ]
    if len(points) < 2:
        raise UsageError(f"{path} has no two sizes: run the test with -b 4K -e 256M -f 4, say")
    return Measured(kind, ranks, len({*hosts}), points)


def with_links(base: Device, runs: Sequence[Measured]) -> Device:
    """Return a profile with the links that were measured, and all else as in `base`.

    Raises:
        UsageError: hosts of a run have different numbers of ranks, or all-to-alls were measured
            over several hosts.
    """
    links: dict[str, Link] = {}
    out = base.hosts
    for run in sorted(runs, key=lambda run: run.kind == "all_reduce"):  # the last one counts
        found = link(run.kind, run.points, run.ranks)
        if run.hosts == 1:
            each = run.ranks - 1 if base.peer_links else 1
            links[run.kind] = found.model_copy(update={"bytes_per_s": found.bytes_per_s // each})
            continue
        if run.ranks % run.hosts:
            raise UsageError(f"{run.ranks} ranks on {run.hosts} hosts: measure equally many on all")
        if run.kind == "all_to_all":
            raise UsageError("alltoall_perf over several hosts: give all_reduce_perf over them")
        near = run.ranks // run.hosts
        devices, speed = (out.devices if out else near), max(found.bytes_per_s // near, 1)
        out = Hosts(devices=devices, latency_ns=found.latency_ns, bytes_per_s=speed)
    said = ", ".join(f"{r.kind} on {r.ranks} ranks of {r.hosts} hosts" for r in runs)
    source = f"links measured by nccl-tests ({said}); all else: {base.source}"
    links_now = base.links.model_copy(update=links)
    return base.model_copy(update={"links": links_now, "hosts": out, "source": source})
