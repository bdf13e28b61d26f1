"""Two hosts of four ranks with a slow link between them: is the mesh that is chosen the fastest?

    sudo python -m benchmarks.links --json FILE            10 models, 12 plans and more of each
    sudo python -m benchmarks.links llama --phase train    one model

The hosts are network namespaces of this machine with names of their own, and `tc` slows the link
between them. `shardwright calibrate`'s cases measure both levels, but all ranks repeat each case at
once: they share cores. Then plans for all meshes of dp, cp and tp, some with sequence parallelism
and blocks that are computed again, are timed in turn on gloo ranks. Prints the rank correlation of
predicted and measured times, and how far the chosen plan is from the fastest. Exits with 1 if the
correlation is below 0.85 for a model, or the chosen plan is 5 % slower for more than one model in
ten. Needs Linux, root, `ip`, `tc` and `unshare`.

The link is so slow that it decides, and not how ranks share cores: ops take longer than predicted
where other ranks wait for the same cores. `docs/measured.md` has figures of faster links, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.demo_launch import ROOT
from benchmarks.links_rank import BATCH, MODELS, SEQ, config
from benchmarks.prediction import spearman
from shardwright.errors import InfeasibleError
from shardwright.planner.contract.files import write_atomically
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.prepare import read
from shardwright.planner.search.ladder import search

HOSTS, RANKS = 2, 4
"""Hosts, and ranks on each."""
LEAST, WITHIN = 0.85, 1.05
"""Least rank correlation, and most time of the chosen plan in shares of the fastest's."""
NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
"""Runs a command with a host name of its own: ranks of one host would share memory."""
WAYS: dict[str, dict[str, Any]] = {
    "": {"sequence_parallel": False, "recompute": False},
    "sequence": {"sequence_parallel": True, "recompute": False},
    "again": {"sequence_parallel": False, "recompute": True},
}


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


@contextlib.contextmanager
def hosts(rate: str) -> Iterator[None]:
    """Inside, there are two namespaces with a link of this rate each way."""
    names = [f"shardwright{i}" for i in range(HOSTS)]
    ends = [f"sw{i}" for i in range(HOSTS)]
    try:
        for name in names:
            _call("ip", "netns", "add", name)
        _call("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for i, (name, end) in enumerate(zip(names, ends, strict=True)):
            _call("ip", "link", "set", end, "netns", name)
            inside = ("ip", "netns", "exec", name)
            _call(*inside, "ip", "addr", "add", f"{_address(i)}/24", "dev", end)
            _call(*inside, "ip", "link", "set", end, "up")
            _call(*inside, "ip", "link", "set", "lo", "up")
            slow = ("tbf", "rate", rate, "burst", "16kb", "latency", "1s")
            _call(*inside, "tc", "qdisc", "add", "dev", end, "root", *slow)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def on_hosts(arguments: Sequence[str], limit: float = 1800.0) -> None:
    """Run a module under torchrun on the ranks of both hosts."""
    started = []
    for i in range(HOSTS):
        command = [
            "ip",
            "netns",
            "exec",
            f"shardwright{i}",
            *NAMED,
            f"host{i}",
            sys.executable,
            "-m",
        ]
        command += ["torch.distributed.run", f"--nnodes={HOSTS}", f"--nproc-per-node={RANKS}"]
        command += [f"--node-rank={i}", f"--master-addr={_address(0)}", "--master-port=29511", "-m"]
        own = {"GLOO_SOCKET_IFNAME": f"sw{i}", "OMP_NUM_THREADS": "1"}
        path = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        environ = os.environ | own | path
        started.append(subprocess.Popen([*command, *arguments], env=environ, cwd=ROOT))
    codes = [process.wait(limit) for process in started]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def all_meshes() -> Iterator[dict[str, int]]:
    """Yield all meshes of dp, cp and tp."""
    ranks = HOSTS * RANKS
    for dp, cp in product(range(1, ranks + 1), repeat=2):
        if ranks % (dp * cp) == 0 and BATCH % dp == 0:
            dims = {"dp": dp, "cp": cp, "tp": ranks // (dp * cp)}
            yield {name: n for name, n in dims.items() if n > 1 or name == "tp"}


def plans(name: str, phase: str, device: str) -> dict[str, Plan]:
    """Return the plans to compare, by what distinguishes them; some without cp in several ways."""
    out = {}
    for way, how in WAYS.items():
        if way == "again" and phase != "train":
            continue
        model = read(config(name), BATCH, seq=SEQ, phase=phase, device=device, **how)
        for mesh in all_meshes():
            if way and ("cp" in mesh or mesh["tp"] < RANKS):
                continue
            try:
                plan = search(model.on(mesh, "ddp", RANKS)).plan
            except InfeasibleError:
                continue
            dims = ",".join(f"{dim}={n}" for dim, n in mesh.items())
            out[f"{dims} {way}".strip()] = plan
    return out


def compared(name: str, phase: str, device: str, repeat: int) -> dict[str, Any]:
    """Plan and time all plans of a model."""
    found = plans(name, phase, device)
    with tempfile.TemporaryDirectory() as own:
        job = {"model": name, "repeat": repeat, "plans": len(found)}
        (Path(own) / "job.json").write_text(json.dumps(job))
        for i, plan in enumerate(found.values()):
            plan.save(Path(own) / f"{i}.json")
        on_hosts(["benchmarks.links_rank", own])
        seconds = json.loads((Path(own) / "seconds.json").read_text())
    predicted = [plan.predicted.time_ns / 1e6 for plan in found.values()]
    measured = [each * 1e3 for each in seconds]
    chosen = measured[predicted.index(min(predicted))]
    rows = [
        {"plan": n, "predicted_ms": round(p, 1), "measured_ms": round(m, 1)}
        for n, p, m in zip(found, predicted, measured, strict=True)
    ]
    correlation = round(spearman(predicted, measured), 3)
    times = round(chosen / min(measured), 3)
    return {"model": name, "rows": rows, "rank_correlation": correlation, "chosen": times}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*MODELS]))
@click.option("--phase", type=click.Choice(["prefill", "train"]), default="train")
@click.option("--rate", default="50mbit", help="Of the link between the hosts.")
@click.option("--device", help="A profile that was measured here before, in place of calibrating.")
@click.option("--repeat", default=5, help="Most runs of each plan.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(
    names: tuple[str, ...],
    phase: str,
    rate: str,
    device: str | None,
    repeat: int,
    path: Path | None,
) -> None:
    """Compare predicted with measured times on two hosts."""
    console, found = Console(stderr=True), []
    with hosts(rate), tempfile.TemporaryDirectory() as own:
        if device is None:
            device = f"{own}/profile.json"
            on_hosts(["benchmarks.links_rank", device])
        profile = json.loads(Path(device).read_text())
        for name in track(
            names or [*MODELS], "timing", console=console, disable=not console.is_terminal
        ):
            found.append(compared(name, phase, device, repeat))
            _show(found[-1])
            if path:
                about = {"phase": phase, "rate": rate, "device": profile}
                result = {"about": about, "models": found}
                write_atomically(path, json.dumps(result, indent=1) + "\n")
    slow = [each["model"] for each in found if each["chosen"] > WITHIN]
    weak = [each["model"] for each in found if each["rank_correlation"] < LEAST]
    print(f"chosen more than {WITHIN - 1:.0%} behind the fastest: {', '.join(slow) or 'none'}")
    print(f"rank correlation below {LEAST}: {', '.join(weak) or 'none'}")
    sys.exit(int(bool(weak) or len(slow) * 10 > len(found)))


def _show(found: dict[str, Any]) -> None:
    table = Table("plan", "predicted ms", "measured ms", box=None, title=found["model"])
    for row in sorted(found["rows"], key=lambda row: row["predicted_ms"]):
        table.add_row(row["plan"], str(row["predicted_ms"]), str(row["measured_ms"]))
    Console(width=100).print(table)
    print(f"correlation {found['rank_correlation']}, chosen {found['chosen']} of the fastest\n")


if __name__ == "__main__":
    main()
