"""What a placement costs: whole numbers of nanoseconds and bytes, for a stated workload and device.

Collectives follow the usual ring model: over n ranks an all-reduce moves 2(n-1)/n of its bytes
through each link, an all-gather or reduce-scatter (n-1)/n, each with a start-up latency
(Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).
Ops follow the roofline model: the longer of arithmetic and memory traffic.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from shardwright.errors import UsageError
from shardwright.planner.axes import ATOM, Axes, Dim, find, leaves_of
from shardwright.planner.graph import Graph, Op
from shardwright.planner.plan_file import Workload
from shardwright.planner.states import NOTHING, PARTIAL, WHOLE, Mode, State, States

TRACE_BATCH, TRACE_SEQ = 3, 19
"""Sizes with which models are traced: primes, so that nothing splits them by accident."""


@dataclass(frozen=True)
class Device:
    """A device and the link between two of its kind."""

    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    latency_s: float
    sources: str


@lru_cache(maxsize=1)
def devices() -> dict[str, Device]:
    """The device profiles that come with Shardwright."""
    data = json.loads((Path(__file__).parent / "devices.json").read_text())
    return {name: Device(**values) for name, values in data.items()}


def device(name: str) -> Device:
    """The profile of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in devices():
        raise UsageError(f"unknown device '{name}'; known: {', '.join(sorted(devices()))}")
    return devices()[name]


class Collective(NamedTuple):
    """A collective of one rank: its kind and the bytes that enter it."""

    kind: str
    bytes: int


class Crossing(NamedTuple):
    """The collectives of one change of placement, forward and backward."""

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()


class Costs:
    """Prices states, modes and crossings of one graph."""

    def __init__(self, graph: Graph, axes: Axes, states: States, workload: Workload) -> None:
        self.graph, self.axes, self.states = graph, axes, states
        self.workload, self.device = workload, device(workload.device)
        self._producer = graph.producers()

    @cached_property
    def run_time(self) -> dict[int, int]:
        """Dims of run-time size, with the length that the workload gives them."""
        lengths = {TRACE_BATCH: self.workload.batch, TRACE_SEQ: self.workload.seq}
        dims = [find(d) for name in self.graph.inputs for d in self.axes.dims[name]]
        dims += [a for d in dims for a in leaves_of(d)]
        return {d.id: lengths[d.size] for d in dims if d.size in lengths}

    def length(self, dim: Dim, cut: frozenset[int] = frozenset()) -> int:
        """Length of `dim` in the workload on the rank that holds most, with `cut` split."""
        dim = find(dim)
        if dim.id in self.run_time:
            return self.run_time[dim.id]
        if dim.kind == ATOM:
            return -(-dim.size // self.states.ranks) if dim.id in cut else dim.size
        parts = [self.length(c, cut) for c in dim.children]
        return prod(parts) if dim.kind == "product" else sum(parts)

    def bytes(self, name: str, state: State) -> int:
        """Bytes of tensor `name` on the rank that holds most of it."""
        dims = self.axes.dims[name]
        n = prod(
            self.length(d, frozenset(a for i, a in state.shards if i == k))
            for k, d in enumerate(dims)
        )
        return n * self.graph.tensors[name].dtype.itemsize

    def uncovered_bytes(self, name: str, state: State) -> int:
        """Bytes of the parts that every rank holds."""
        n = self.states.ranks
        whole = self.bytes(name, State(frozenset(), NOTHING))
        mine = self.bytes(name, state)
        return max((mine * n - whole) // (n - 1), 0) if n > 1 else whole

    def nanoseconds(self, collectives: tuple[Collective, ...]) -> int:
        """Time that these collectives take."""
        n, total = self.states.ranks, 0.0
        for kind, size in collectives:
            moved = {
                "all_reduce": 2 * (n - 1) / n * size,
                "all_gather": (n - 1) * size,
                "reduce_scatter": (n - 1) / n * size,
            }[kind]
            total += self.device.latency_s + moved / self.device.link_bytes_per_s
        return round(total * 1e9)

    def crossing(self, name: str, source: State, target: State) -> Crossing | None:
        """What taking tensor `name` from `source` to `target` costs; None if it cannot be."""
        if source == target:
            return Crossing()
        full = self.bytes(name, State(frozenset(), NOTHING))
        differentiable = self.graph.tensors[name].differentiable
        covered = [
            self.states.covered(name, s.shards) if s.shards else None for s in (source, target)
        ]
        kinds = tuple(_kind(s, c) for s, c in zip((source, target), covered, strict=True))
        if source.shards and target.shards:
            if source.shards != target.shards or kinds != ("stored parts", "parts"):
                return None
            return Crossing(
                backward=(Collective("all_reduce", self.uncovered_bytes(name, source)),)
            )
        entry = CROSSINGS.get(kinds)
        if entry is None:
            return None
        small = self.bytes(name, source if source.shards else target)
        sizes = {"all_reduce": full, "reduce_scatter": full, "all_gather": small}
        forward, backward = (tuple(Collective(k, sizes[k]) for k in side) for side in entry)
        return Crossing(forward, backward if differentiable else ())

    def inner_crossing(
        self, name: str, before: State, source: State, target: State
    ) -> tuple[Crossing | None, bool]:
        """The same for a tensor that a module around has just taken from `before` to `source`.

        Where that made a pending sum of it (a residual that is added to pending sums, all in one
        all-reduce), what it was before is still there. Second: whether that is taken instead.
        """
        crossing = self.crossing(name, source, target)
        if (before, source) != (WHOLE, PARTIAL) or target == source:
            return crossing, False
        return self.crossing(name, before, target), True

    def compute(self, op: Op, mode: Mode) -> int:
        """Nanoseconds that `op` takes in `mode` on one rank, by arithmetic and traffic."""
        rule = self.axes.rules.get(op.name)
        names = (*op.inputs, *op.outputs)
        traffic = sum(self.bytes(n, s) for n, s in zip(names, mode.states, strict=True))
        flops = 0
        if rule is not None and rule.sum:
            cut = {x: frozenset(a for y, a in mode.split if y == x) for x in rule.axes()}
            flops = 2 * prod(self.length(d, cut[x]) for x, d in self.axes.axes[op.name].items())
        return round(1e9 * max(flops / self.device.flops, traffic / self.device.memory_bytes_per_s))


def _kind(state: State, covered: bool | None) -> str:
    if covered is None:
        return {"": "whole", "value": "partial", "gradient": "copied"}[state.pending]
    if covered:
        return "shard"
    return "stored parts" if state.pending == NOTHING else "parts"


CROSSINGS: dict[tuple[str, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("whole", "copied"): ((), ("all_reduce",)),
    ("whole", "partial"): ((), ()),
    ("whole", "shard"): ((), ("all_gather",)),
    ("whole", "stored parts"): ((), ()),
    ("copied", "shard"): ((), ()),
    ("copied", "parts"): ((), ()),
    ("partial", "whole"): (("all_reduce",), ()),
    ("partial", "copied"): (("all_reduce",), ("all_reduce",)),
    ("partial", "shard"): (("reduce_scatter",), ("all_gather",)),
    ("shard", "whole"): (("all_gather",), ()),
    ("shard", "copied"): (("all_gather",), ("reduce_scatter",)),
}
"""(source, target) -> collectives forward and backward; what is missing no border can do."""
