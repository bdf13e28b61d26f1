"""Somebody else on this machine connects to every port that ranks open, and sends what may do harm.

`check --numeric` starts ranks by itself; for `load` and `apply` they are started as torchrun would.
The ranks of `apply` meet as those of `load` do, or in a group that their own code has formed. While
they run, a process of another account (where this is root's) connects to each port on which one of
them listens. Nothing of what it sends may run, and each rank goes on or ends with one line.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import shardwright
from benchmarks.faults.models import checkpoint
from benchmarks.faults.outcomes import Tally, Wrong
from benchmarks.forked import Ended, run_forked
from shardwright.errors import ShardwrightError

Address = tuple[int, str, int]
"""Family, where it is bound to in hexadecimal numbers, port."""

LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
"""As `/proc/net` has the addresses that no other machine can reach."""

TIMEOUT = 30.0
"""Seconds that ranks of `load` and `apply` wait for each other."""

LIMIT = 90.0
"""Seconds after which ranks of `load` and `apply` hang; a command may take twice as long."""

KEYS = ("shardwright/asks/1", "shardwright/asks/0", "init/", "default_pg/0//cpu//0/0", "rank/1")
"""What ranks may look for in their store."""


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def messages(trace: Path) -> list[bytes]:
    """What is sent to a port, each in a connection of its own."""
    bomb = pickle.dumps(Bomb(trace))
    entries = b"".join(
        b"\x01" + b"".join(struct.pack("<Q", len(x)) + x for x in (key.encode(), bomb))
        for key in KEYS
    )
    store = b"\x00" + struct.pack("<I", 0x3C85F7CE) + entries  # the protocol of torch's TCPStore
    numbered = b"".join(struct.pack("<q", n) + bomb for n in range(4))  # that of gloo
    return [b"", b"\0", bomb, store, numbered, b"GET / HTTP/1.0\r\n\r\n", os.urandom(1 << 16)]


def listening() -> set[Address]:
    """Where descendants of this process listen."""
    inodes = {link for pid in _descendants() for link in _sockets(pid)}
    out: set[Address] = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                bound, _, port = fields[1].partition(":")
                out.add((family, bound, int(port, 16)))
    return out


def _descendants() -> set[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, left = set(), [os.getpid()]
    while left:
        below = children.get(left.pop(), [])
        found.update(below)
        left += below
    return found


def _sockets(pid: int) -> Iterator[str]:
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = str(link.readlink())
            if target.startswith("socket:["):
                yield target[8:-1]
    except OSError:
        return


class Stranger:
    """Attacks all ports that descendants of this process open, while it is entered."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace
        self.tries = 0
        self.bound: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._attack, daemon=True)

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _attack(self) -> None:
        with subprocess.Popen(
            [sys.executable, "-Sc", STRANGER],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            while not self._ended.wait(0.05):
                for family, bound, port in listening():
                    self.bound.add(bound)
                    host = "127.0.0.1" if family == socket.AF_INET else "::1"
                    for message in messages(self.trace):
                        process.stdin.write(f"{int(family)} {host} {port} {message.hex()}\n")
                        process.stdin.flush()
                        self.tries += process.stdout.readline() == "connected\n"
            process.stdin.close()


STRANGER = """
import os, socket, sys
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
held = []
for line in sys.stdin:
    family, host, port, *message = line.split()
    try:
        connection = socket.socket(int(family))
        connection.settimeout(1)
        connection.connect((host, int(port)))
        held = [*held[-20:], connection]
        connection.sendall(bytes.fromhex("".join(message)))
        print("connected", flush=True)
    except OSError as error:
        print(error, flush=True)
"""


def loads(model: Path, plan: Path) -> None:
    """What a rank does that loads a checkpoint."""
    split = shardwright.load(model, plan, timeout=TIMEOUT)
    _forward(split)


def applies(model: Path, plan: Path) -> None:
    """What a rank does that splits a model at hand."""
    _forward(shardwright.apply(_unsplit(model), plan, timeout=TIMEOUT))


def applies_in_own_group(model: Path, plan: Path) -> None:
    """What a rank does that splits a model at hand, in a group that its own code has formed."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    _forward(shardwright.apply(_unsplit(model), plan, mesh))


def _unsplit(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model).eval()


def _forward(split: Any) -> None:
    for _ in range(20):
        print(split(torch.arange(5).unsqueeze(0)).logits.abs().sum().item(), flush=True)
        time.sleep(0.05)


def check(model: Path, plan: Path, folder: Path) -> None:
    """`check --numeric`, as a command.

    Raises:
        ShardwrightError: it ends in one line.
        Wrong: in anything else.
    """
    command = [sys.executable, "-m", "shardwright", "check", str(plan), str(model), "--numeric"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT, check=False)
    if done.returncode:
        _in_one_line(done.stderr)


def forked(
    work: Callable[..., None], own_group: bool = False
) -> Callable[[Path, Path, Path], None]:
    """`work` on two ranks, as an attempt. The end of each rank counts.

    With an `own_group`, torch may fail before any code of ours runs: see `_torch_failed`.
    """

    def attempt(model: Path, plan: Path, folder: Path) -> None:
        ends = run_forked(2, work, (model, plan), folder, limit=LIMIT)
        if own_group and any(map(_torch_misread, ends)):
            ends = [end for end in ends if not _torch_failed(end)]
        bad = [f"rank {r} {end.how}: {end.log}" for r, end in enumerate(ends) if end.how in WORSE]
        bad += [f"no single line: {end.text}" for end in ends if "\n" in end.text.strip()]
        if bad:
            raise RuntimeError("\n".join(bad))
        if failed := [end.text for end in ends if end.how == "error"]:
            raise ShardwrightError(failed[0])
        if len({_last_number(end.log) for end in ends}) > 1:
            raise Wrong("the ranks computed different numbers")

    return attempt


WORSE = ("hangs", "killed", "raw")
"""How no rank may end."""


def _torch_misread(end: Ended) -> bool:
    """Return whether a rank took a stranger for another rank, in torch's own start."""
    return _torch_failed(end) and ("ValueError: stoi" in end.log or "gloo/transport" in end.log)


def _torch_failed(end: Ended) -> bool:
    """Return whether a rank ended, by itself, in torch's own start."""
    return end.how == "raw" and "in init_process_group" in end.log and "/runtime/" not in end.log


def _last_number(log: str) -> str:
    """Return the last number that a rank printed; torch logs failed connections beside it."""
    return [line for line in log.splitlines() if re.fullmatch(r"\d+\.\d+", line)][-1]


def _in_one_line(stderr: str) -> None:
    lines = [line for line in stderr.splitlines() if line.startswith("Error: ")]
    if len(lines) != 1 or "Traceback" in stderr:
        raise RuntimeError(stderr)
    raise ShardwrightError(lines[0])


ATTEMPTS = {
    "check --numeric": check,
    "load": forked(loads),
    "apply": forked(applies),
    "apply in a group of torch's": forked(applies_in_own_group, own_group=True),
}


def campaign(count: int, seed: int) -> Iterator[tuple[str, Tally]]:
    """The tallies of ranks that a stranger connects to, at least `count` times in all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, seed)
        for kind in ATTEMPTS:
            tally, tries = Tally(), 0
            while tries < count / len(ATTEMPTS):
                tries += attacked(tally, kind, folder)
            yield f"{kind}, {tries} connections", tally


def prepare(folder: Path, seed: int = 0) -> None:
    """A model and its plan for two ranks."""
    model = checkpoint(folder / "model", seed=seed)
    shardwright.plan(model, 2, objective="memory").save(folder / "plan.json")


def attacked(tally: Tally, kind: str, folder: Path) -> int:
    """Make an attempt under attack; how often a stranger got through to a port.

    Counted as wrong is also a port that other machines can reach, of ranks that we start.
    """
    trace = folder / "ran"

    def under_attack() -> None:
        ATTEMPTS[kind](folder / "model", folder / "plan.json", folder)

    with Stranger(trace) as stranger:
        tally.take(kind, 2 * LIMIT, under_attack)
    if trace.exists():
        tally.note(kind, "wrong", "what a stranger sent has run")
    if ATTEMPTS[kind] is check and not stranger.bound <= {*LOOPBACK}:
        tally.note(kind, "wrong", f"ports are open to other machines: {stranger.bound}")
    if not stranger.tries:
        raise RuntimeError(f"{kind}: no port was found, or nobody could connect")
    return stranger.tries
