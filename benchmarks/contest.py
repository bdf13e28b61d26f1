"""Google's contest on intra-operator parallelism: its instances, a solver for them, a scorer.

    python -m benchmarks.contest FILE…                          # .json or .json.gz
    python -m benchmarks.contest FILE… --seconds 60 --workers 1 --out DIR

An instance gives the strategies of each node of a graph, the costs of strategies and of pairs of
them, and how much memory each takes and when. The goal is the least cost at which the memory in use
never exceeds a limit. For published instances, the file name gives the time limit and the best
known cost; nothing else depends on it. `--out` writes each solution in the contest's format.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import decompose
from benchmarks.decompose.grid import FORBIDDEN, Grid
from benchmarks.decompose.limits import LimitedProblem, Use
from shardwright.planner.solvers.problem import Result

SECONDS = 300.0
KNOWN = {"B": (60, 532_843), "G": (120, 217_039), "V": (300, 1_617_084)}
"""Published instances: the time limit in seconds, and the best known cost."""
TOO_MUCH = 10**17
"""Costs of at least this much stand for what is forbidden."""


@dataclass(frozen=True)
class Instance:
    """The content of a file."""

    intervals: list[tuple[int, int]]
    costs: list[list[int]]
    usages: list[list[int]]
    edges: list[tuple[int, int]]
    edge_costs: list[Any]
    """An array per edge, with one row per strategy of its first node."""
    limit: int | None


def read(path: Path) -> Instance:
    """Read an instance."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return parsed(json.load(file)["problem"])


def parsed(data: dict[str, Any]) -> Instance:
    """Parse the instance from a file's `problem`."""
    nodes, edges = data["nodes"], data["edges"]
    sizes = [len(c) for c in nodes["costs"]]
    pairs = [(int(a), int(b)) for a, b in edges["nodes"]]
    tables = []
    for (a, b), costs in zip(pairs, edges["costs"], strict=True):
        tables.append(np.array(costs, dtype=np.int64).reshape(sizes[a], sizes[b]))
    intervals = [(int(i[0]), int(i[1])) if i else (0, 0) for i in nodes["intervals"]]
    limit = data.get("usage_limit")
    return Instance(intervals, nodes["costs"], nodes["usages"], pairs, tables, limit)


def problem_of(instance: Instance) -> LimitedProblem:
    """Convert the instance to the solver's problem."""
    problem = LimitedProblem(("cost",))
    shared: dict[bytes, Any] = {}
    for k, costs in enumerate(instance.costs):
        problem.variable(f"node{k}", len(costs))
        table = np.array([c if c < TOO_MUCH else FORBIDDEN for c in costs], dtype=np.int64)
        problem.factors.append(Grid(f"node{k}", (k,), table))
    for k, ((a, b), costs) in enumerate(zip(instance.edges, instance.edge_costs, strict=True)):
        table = np.where(costs < TOO_MUCH, costs, FORBIDDEN)
        table = shared.setdefault(str(table.shape).encode() + table.tobytes(), table)
        if a == b:
            problem.factors.append(Grid(f"edge{k}", (a,), np.ascontiguousarray(table.diagonal())))
        else:
            problem.factors.append(Grid(f"edge{k}", (a, b), table))
    if instance.limit is not None:
        rows = moments(instance.intervals)
        problem.limits.bounds = [instance.limit] * len(rows)
        for k, (start, stop) in enumerate(instance.intervals):
            first, last = bisect_left(rows, start), bisect_left(rows, stop)
            if first < last:
                problem.limits.uses.append(Use(k, first, last, tuple(instance.usages[k])))
    return problem


def moments(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """Return times at which usage peaks: between two of them, something ends before any begins."""
    starts, ends = {a for a, b in intervals if b > a}, {b for a, b in intervals if b > a}
    out: list[int] = []
    begun: int | None = None
    for t in sorted(starts | ends):
        if t in ends and begun is not None:
            out.append(begun)
            begun = None
        if t in starts:
            begun = t
    return out


def score(instance: Instance, solution: Sequence[int]) -> int | None:
    """Return a solution's cost by the rules, from the file only; None if it breaks a rule."""
    costs = [own[s] for own, s in zip(instance.costs, solution, strict=True)]
    costs += [
        int(table[solution[a], solution[b]])
        for (a, b), table in zip(instance.edges, instance.edge_costs, strict=True)
    ]
    change: dict[int, int] = {}
    for (start, stop), usage, s in zip(instance.intervals, instance.usages, solution, strict=True):
        if start < stop:
            change[start] = change.get(start, 0) + usage[s]
            change[stop] = change.get(stop, 0) - usage[s]
    used = 0
    for t in sorted(change):
        used += change[t]
        if instance.limit is not None and used > instance.limit:
            return None
    return None if max(costs) >= TOO_MUCH else sum(costs)


def known(path: Path) -> tuple[float, int | None]:
    """Return an instance's time limit and best known cost, by its file name."""
    found = re.search(r"iopddl-([A-Z])\.json", path.name)
    return KNOWN.get(found[1], (SECONDS, None)) if found else (SECONDS, None)


@dataclass(frozen=True)
class How:
    """Options of the solver."""

    seconds: float | None
    workers: int | None
    seed: int
    out: Path | None

    def solve(self, problem: LimitedProblem, seconds: float) -> Result:
        """Run the solver."""
        return decompose.solve(problem, 0, {}, None, seconds, self.workers, self.seed)


def run(path: Path, how: How) -> str:
    """Solve one instance and return a line about the result."""
    began = time.monotonic()
    limit, best = known(path)
    limit = how.seconds or limit
    instance = read(path)
    problem = problem_of(instance)
    # The steps after the solver take no longer than those before it.
    left = 0.98 * limit - 2 * (time.monotonic() - began)
    result = how.solve(problem, left)
    took = time.monotonic() - began
    line = f"{path.name}: {len(instance.costs):,} nodes, {len(instance.edges):,} edges"
    if result.assignment is None:
        return f"{line}: {result.status}, bound {result.bound:,}, {took:.1f} s of {limit:g}"
    cost = score(instance, result.assignment)
    if cost is None:
        return f"{line}: {result.status}, but the solution is WRONG, {took:.1f} s"
    if how.out is not None:
        how.out.mkdir(parents=True, exist_ok=True)
        name = path.name.removesuffix(".gz")
        (how.out / name).write_text(json.dumps({"solution": list(result.assignment)}) + "\n")
    against = (
        f" ({cost / best - 1:+.4%}, bound {result.bound / best - 1:+.4%} of best)" if best else ""
    )
    memory = sum(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return (
        f"{line}: {result.status}, cost {cost:,}, bound {result.bound:,}{against}, "
        f"{took:.1f} s of {limit:g}, {memory / 2**20:.2f} GiB"
    )


def main() -> None:
    """Run the files that were named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, help="for each, instead of its own limit")
    parser.add_argument("--workers", type=int, help="processes; default: the cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write solutions here")
    args = parser.parse_args()
    for path in args.files:
        how = How(args.seconds, args.workers, args.seed, args.out)
        print(run(path, how), flush=True)


if __name__ == "__main__":
    main()
