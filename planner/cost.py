"""What a placement costs: whole numbers of nanoseconds and bytes, for a stated workload and device.

`planner/device.py` says what a collective takes and what arithmetic and memory traffic take; this
file says how many bytes and operations there are.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import NamedTuple

from shardwright.planner.axes import ATOM, Axes, Dim, find, leaves_of
from shardwright.planner.device import device
from shardwright.planner.graph import Graph, Op
from shardwright.planner.plan_file import Workload
from shardwright.planner.states import NOTHING, PARTIAL, WHOLE, Mode, State, States

TRACE_BATCH, TRACE_SEQ = 3, 19
"""Sizes with which models are traced: primes, so that nothing splits them by accident."""


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
        """Dims of run-time size, with the length that the workload gives them.

        A dim that a parameter has too (3 colours of an image) is no batch, whatever its size.
        """
        lengths = {TRACE_BATCH: self.workload.batch, TRACE_SEQ: self.workload.seq}
        dims = [find(d) for name in self.graph.inputs for d in self.axes.dims[name]]
        dims += [a for d in dims for a in leaves_of(d)]
        stored = {u.stored for u in self.graph.uses}
        known = {find(d).id for name in stored for d in self.axes.dims[name]}
        return {d.id: lengths[d.size] for d in dims if d.size in lengths and d.id not in known}

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
        ranks = self.states.ranks
        return sum(self.device.collective(kind, size, ranks) for kind, size in collectives)

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
        # Of uneven parts, collectives move as many as there are ranks of the largest.
        padded = small * self.states.ranks
        sizes = {"all_reduce": full, "reduce_scatter": padded, "all_gather": small}
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
        names = (*op.inputs, *op.outputs)
        traffic = sum(self.bytes(n, s) for n, s in zip(names, mode.states, strict=True))
        dtype = op.call.result_dtypes[0] if op.outputs else None
        return self.device.compute(self.flops(op, mode), traffic, str(dtype).split(".")[-1])

    def flops(self, op: Op, mode: Mode) -> int:
        """Operations of the matrix products in `op`; of others, which wait for memory, none."""
        rule = self.axes.rules.get(op.name)
        attention = op.call.op == "scaled_dot_product_attention"
        if rule is None or not (rule.sum or attention):
            return 0
        cut = {x: frozenset(a for y, a in mode.split if y == x) for x in rule.axes()}
        sizes = {x: self.length(d, cut[x]) for x, d in self.axes.axes[op.name].items()}
        if attention:  # queries times keys, then weights times values
            d, e = sizes.pop("d"), sizes.pop("e")
            return 2 * prod(sizes.values()) * (d + e)
        if op.call.op in ONE_AT_A_TIME:
            sizes = {x: n for x, n in sizes.items() if not x.startswith("x")}
        return 2 * prod(sizes.values())


def _kind(state: State, covered: bool | None) -> str:
    if covered is None:
        return {"": "whole", "value": "partial", "gradient": "copied"}[state.pending]
    if covered:
        return "shard"
    return "stored parts" if state.pending == NOTHING else "parts"


ONE_AT_A_TIME = ("_grouped_mm", "grouped_mm_fallback", "convolution")
"""Ops in which a result takes one of the x of the rule: one expert, one place for each tap."""

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
