"""What a placement costs: whole numbers of nanoseconds and bytes, for a stated workload and device.

`planner/devices/device.py` says what a collective takes and what arithmetic and memory traffic
take; this file says how many bytes and operations there are, in each pass that the workload makes.
An op that is differentiated is counted three times where it trains: a product has two in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

from shardwright.planner.contract.plan_file import Workload
from shardwright.planner.contract_tmp.crossings import COLLECTIVES, SHARED, Step, steps, without
from shardwright.planner.cost.copies import APART, copied, order
from shardwright.planner.cost.memory import Holdings
from shardwright.planner.cost.phases import Pass, passes
from shardwright.planner.devices.device import device
from shardwright.planner.graph.axes import ATOM, Axes, Dim, find, leaves_of
from shardwright.planner.graph.graph import Boundary, Graph, Op
from shardwright.planner.graph.kv_cache import (
    ATTENTION,
    Keys,
    counts_tokens,
    find_keys,
    last_of_two,
)
from shardwright.planner.graph.views import is_view
from shardwright.planner.strategies.states import Cut, State, States, Strategy, cut_of, made_pending
from shardwright.rules.notation import letters

TRACE_BATCH, TRACE_SEQ, TRACE_SOURCE, TRACE_ROWS = 3, 19, 23, 1009
"""Sizes with which models are traced: primes, so that nothing splits them by accident. The last are
the length of a sequence that another model encoded, and how many rows data selects of tokens."""


class Collective(NamedTuple):
    """A collective of one rank: its kind, the bytes that enter it, and how many ranks take part."""

    kind: str
    bytes: int
    ranks: int


class Crossing(NamedTuple):
    """The collectives of one change of placement, forward and backward.

    `copied` and `copied_back` are the bytes that the rank's own copies read and write meanwhile.
    """

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    copied: int = 0
    copied_back: int = 0


class Toll(NamedTuple):
    """Nanoseconds of a change of placement in all passes.

    `backward` is that of a backward pass where the workload has none; it breaks ties.
    """

    time: int
    backward: int


class Costs:
    """Prices states, strategies and crossings of one graph.

    Args:
        graph: The traced model.
        axes: Its refined dims.
        states: Domains and strategies.
        workload: What is priced.
        caches: Whether the model generates, and so keeps the keys and values of earlier tokens.
        gathered: Stored tensors that may be gathered as they are read; others stay where they are.
    """

    def __init__(
        self,
        graph: Graph,
        axes: Axes,
        states: States,
        workload: Workload,
        caches: bool = False,
        gathered: frozenset[str] = frozenset(),
    ) -> None:
        self.caches, self.gathered = caches, gathered
        self.graph, self.axes, self.states = graph, axes, states
        self.workload, self.device = workload, device(workload.device)
        self.passes = passes(workload)
        self._counts: dict[int, bool] = {}
        self._bytes: dict[object, int] = {}
        self._crossings: dict[object, tuple[Crossing | None, bool]] = {}

    @cached_property
    def run_time(self) -> dict[int, str]:
        """Dims of run-time size: whether they are of the "batch" or the "seq", or "rows" of both.

        A dim that a parameter has too (3 colours of an image) is no batch, whatever its size.
        """
        words = {TRACE_BATCH: "batch", TRACE_SEQ: "seq", TRACE_SOURCE: "seq"}
        dims = [find(d) for name in self.graph.inputs for d in self.axes.dims[name]]
        dims += [a for d in dims for a in leaves_of(d)]
        stored = {u.stored for u in self.graph.uses}
        known = {find(d).id for name in stored for d in self.axes.dims[name]}
        out = {d.id: words[d.size] for d in dims if d.size in words and d.id not in known}
        rows = {find(self.axes.dims[n][k]) for n, k in self.graph.fixed}
        return out | {d.id: "rows" for d in rows if d.size == TRACE_ROWS and d.id not in known}

    def counts_tokens(self, dim: Dim) -> bool:
        """Whether the length of `dim` depends on that of the sequence."""
        at = find(dim).id  # once for all copies of a block, which share their dims
        if at not in self._counts:
            self._counts[at] = counts_tokens(dim, self.run_time)
        return self._counts[at]

    @cached_property
    def keys(self) -> Keys:
        """Which dims count keys of attention, and which tensors a cache holds."""
        return find_keys(self.graph, self.axes, self.counts_tokens)

    @cached_property
    def read(self) -> frozenset[str]:
        """The stored tensors that are read where it costs something."""
        graph = self.graph
        found = {n for op in graph.ops if graph.priced(op) for n in op.inputs}
        found |= {b.source for b in graph.boundaries if graph.priced(b)}
        return frozenset(u.stored for u in graph.uses if u.used in found)

    @cached_property
    def holdings(self) -> Holdings:
        """What is held of each tensor."""
        return Holdings(self)  # type: ignore[arg-type]  # pyright sees two of this module

    def length(self, dim: Dim, cut: Cut, run: Pass, keys: bool) -> int:
        """Length of `dim` in a pass on the rank that holds most, with `cut` split.

        `keys` says that a token in it is one that attention looks at, not one that is new.
        """
        dim = find(dim)
        if dim.id in self.run_time:
            tokens = run.keys if keys else run.queries
            word = self.run_time[dim.id]
            size = {"batch": run.batch, "seq": tokens, "rows": run.batch * tokens}[word]
        elif dim.kind == ATOM:
            size = dim.size
        else:
            parts = [self.length(c, cut, run, keys) for c in dim.children]
            return prod(parts) if dim.kind == "product" else sum(parts)
        ways = next((self.states.sub.size(m) for a, m in cut if a == dim.id), 1)
        return -(-size // ways)

    def bytes(
        self, name: str, state: State, run: Pass | None = None, keys: frozenset[int] | None = None
    ) -> int:
        """Bytes of tensor `name` on the rank that holds most of it.

        Args:
            name: The tensor.
            state: Its state.
            run: The pass; else the first of the workload.
            keys: Dims that count keys; else the last of a table of scores.
        """
        dims, run = self.axes.dims[name], run or self.passes[0]
        itemsize = self.graph.tensors[name].dtype.itemsize
        at = (id(dims), itemsize, state.shards, run, keys)  # copies of a block share their dims
        if at not in self._bytes:
            self._bytes[at] = self._measure(dims, state, run, keys) * itemsize
        return self._bytes[at]

    def _measure(
        self, dims: Sequence[Dim], state: State, run: Pass, keys: frozenset[int] | None
    ) -> int:
        if keys is None:
            keys = frozenset() if run.keys == run.queries else last_of_two(dims, self.counts_tokens)
        return prod(
            self.length(d, cut_of(state.shards, k), run, k in keys) for k, d in enumerate(dims)
        )

    def nanoseconds(self, crossing: Crossing) -> tuple[int, int]:
        """Time that a change of placement takes forward and backward."""
        return (
            self._nanoseconds(crossing.forward, crossing.copied),
            self._nanoseconds(crossing.backward, crossing.copied_back),
        )

    def _nanoseconds(self, collectives: tuple[Collective, ...], copied: int) -> int:
        sent = sum(self.device.collective(kind, size, n) for kind, size, n in collectives)
        return sent + self.device.compute(0, copied, "float32")

    def crossing(
        self, name: str, source: State, target: State, run: Pass | None = None
    ) -> Crossing | None:
        """What taking tensor `name` from `source` to `target` takes; None if it cannot be.

        Bytes are those of a pass, by default the first of the workload.
        """
        if source == target:
            return Crossing()
        if not (self._plain(name, source) and self._plain(name, target)):
            return None
        covered = [self.states.covered(name, s.shards) for s in (source, target)]
        found = steps(source, target, (covered[0], covered[1]), self.states.sub.bits)
        if found is None:
            return None
        run = run or self.passes[0]
        ahead = [self._done(name, does, step, run) for step in found for does in step.forward]
        back = [self._done(name, does, step, run) for step in found for does in step.backward]
        if not self.graph.tensors[name].differentiable:
            back = []
        return Crossing(
            tuple(collective for collective, _ in ahead if collective),
            tuple(collective for collective, _ in back if collective),
            sum(spent for _, spent in ahead),
            sum(spent for _, spent in back),
        )

    def _done(self, name: str, does: str, step: Step, run: Pass) -> tuple[Collective | None, int]:
        """The collective over the ranks along a step's sub-axes, and the bytes that are copied."""
        ranks = self.states.sub.size(step.mask)
        sizes = [self.bytes(name, State(shards), run) for shards in (step.before, step.after)]
        part, whole = min(sizes), max(sizes)
        if does == SHARED:  # what all ranks hold, of the parts that they are split into
            whole = self.bytes(name, State(without(step.after, step.mask)), run)
            size = max((sizes[1] * ranks - whole) // (ranks - 1), 0) if ranks > 1 else whole
            return Collective("all_reduce", size, ranks), 2 * size + 2 * sizes[1]
        how = APART
        if does in ("all_gather", "reduce_scatter"):
            dims = self.axes.dims[name]
            how = order(dims, step, ranks, lambda d, c: self.length(d, c, run, False))
        spent = copied(does, part, whole, how)
        if does not in COLLECTIVES:
            return None, spent
        # Of uneven parts, a reduce-scatter moves as many as there are ranks of the largest.
        return Collective(does, part * ranks if does == "reduce_scatter" else part, ranks), spent

    def gradient(self, name: str, state: State) -> Crossing | None:
        """What averages the gradient of a stored tensor over the copies of the model."""
        copies = self.workload.replicas
        if copies < 2 or not self.graph.tensors[name].differentiable or name not in self.read:
            return None
        size = self.bytes(name, state)  # divided, then copied
        return Crossing(backward=(Collective("all_reduce", size, copies),), copied_back=4 * size)

    def gradient_toll(self, name: str, state: State) -> Toll:
        """What that takes in all passes."""
        found = self.gradient(name, state)
        once = self.nanoseconds(found)[1] if found else 0
        trained = sum(run.times for run in self.passes if run.trains)
        return Toll(trained * once, 0 if trained else once)

    def _plain(self, name: str, state: State) -> bool:
        """Whether no axis of run-time size is split within a larger dim: none can be cut there."""
        opened = self.states.sequence.axes if self.states.sequence else ()
        dims = self.axes.dims[name]
        return all(a not in opened or find(dims[d]).id == a for d, a, _ in state.shards)

    def inner_crossing(
        self, name: str, before: State, source: State, target: State, run: Pass | None = None
    ) -> tuple[Crossing | None, bool]:
        """The same for a tensor that a module around has just taken from `before` to `source`.

        Where that made a pending sum of it (a residual that is added to pending sums, all in one
        all-reduce), what it was before is still there. Second: whether that is taken instead.
        """
        tensor = self.graph.tensors[name]
        kind = (id(self.axes.dims[name]), tensor.dtype, tensor.differentiable)
        at = (kind, before, source, target, run)  # copies of a block share their dims
        if at not in self._crossings:
            instead = made_pending(before, source) and target != source
            start = before if instead else source
            self._crossings[at] = self.crossing(name, start, target, run), instead
        return self._crossings[at]

    def sends(self, boundary: Boundary, before: State, source: State, target: State) -> bool:
        """Whether ranks send each other something at a boundary, forward or backward."""
        crossing, _ = self.inner_crossing(boundary.source, before, source, target)
        return crossing is not None and bool(crossing.forward or crossing.backward)

    @cached_property
    def edges(self) -> list[tuple[str, str, str]]:
        """(before, source, target) of every change of placement, as `inner_crossing` takes them."""
        out, outer = [], self.graph.outer()
        readings = self.graph.readings()  # of a parameter: each makes a gradient of its own
        for use in self.graph.uses:
            out += [(use.stored, use.stored, use.used)] * max(readings[use.used], 1)
        for boundary in self.graph.boundaries:
            around = outer.get(boundary.target)
            before = around.source if around else boundary.source
            out.append((before, boundary.source, boundary.target))
        return out

    @cached_property
    def unpriced(self) -> frozenset[str]:
        """Targets of changes of placement that cost nothing."""
        graph = self.graph
        return frozenset(b.target for b in graph.boundaries if not graph.priced(b))

    def toll(self, name: str, before: State, source: State, target: State) -> Toll | None:
        """What that takes in all passes; None if it cannot be."""
        time, backward = 0, 0
        for i, run in enumerate(self.passes):
            crossing, _ = self.inner_crossing(name, before, source, target, run)
            if crossing is None:
                return None
            ahead, back = self.nanoseconds(crossing)
            time += run.times * (ahead + back * run.trains)
            backward += back * (i == 0)
        trains = any(run.trains for run in self.passes)
        return Toll(time, 0 if trains else backward)

    def compute(self, op: Op, strategy: Strategy) -> int:
        """Nanoseconds that `op` takes in `strategy` on one rank, in all passes."""
        return sum(run.times * self.compute_once(op, strategy, run) for run in self.passes)

    def compute_once(self, op: Op, strategy: Strategy, run: Pass) -> int:
        """Nanoseconds that `op` takes in one pass, by arithmetic and traffic; a view takes none."""
        if is_view(op.call) or not op.outputs or not self.graph.priced(op):
            return 0
        rule = self.axes.rules.get(op.name)
        sizes = [self.bytes_at(op, i, s, run) for i, s in enumerate(strategy.states)]
        traffic, made = sum(sizes), sum(sizes[len(op.inputs) :])
        if rule is not None and rule.lookup:  # it reads what it gives, not the whole table
            traffic = min(traffic, 2 * made)
            if any(x in rule.lookup for x, _, _ in strategy.split):
                traffic += 2 * made  # the rows of other ranks are cleared
        flops = self.flops(op, strategy, run)
        trained = run.trains and any(self.graph.tensors[n].differentiable for n in op.outputs)
        factor = 3 if trained else 1
        dtype = str(op.call.result_dtypes[0]).removeprefix("torch.")
        return self.device.compute(factor * flops, factor * traffic, dtype)

    def bytes_at(self, op: Op, i: int, state: State, run: Pass) -> int:
        """Bytes of number `i` of the operands and results of `op`, in a pass."""
        name, rule = (*op.inputs, *op.outputs)[i], self.axes.rules.get(op.name)
        found = self.keys.letters.get(op.name) if run.keys != run.queries else None
        if not found or rule is None:
            return self.bytes(name, state, run)
        exprs = (*rule.operands, *rule.results)[i]
        keys = {k for k, e in enumerate(exprs) if found & set(letters(e))}
        return self.bytes(name, state, run, frozenset(keys))

    def flops(self, op: Op, strategy: Strategy, run: Pass) -> int:
        """Operations of the matrix products in `op`; of others, which wait for memory, none."""
        rule = self.axes.rules.get(op.name)
        if rule is None or not (rule.sum or op.call.op == ATTENTION):
            return 0
        cut = {x: frozenset((a, m) for y, a, m in strategy.split if y == x) for x in rule.axes()}
        keys = self.keys.letters.get(op.name, ()) if run.keys != run.queries else ()
        sizes = {
            x: self.length(d, cut[x], run, x in keys) for x, d in self.axes.axes[op.name].items()
        }
        if op.call.op == ATTENTION:  # queries times keys, then weights times values
            d, e = sizes.pop("d"), sizes.pop("e")
            return 2 * prod(sizes.values()) * (d + e)
        if op.call.op in ONE_AT_A_TIME:
            sizes = {x: n for x, n in sizes.items() if not x.startswith("x")}
        return 2 * prod(sizes.values())


ONE_AT_A_TIME = ("_grouped_mm", "transformers::grouped_mm_fallback", "convolution")
"""Ops in which a result takes one of the x of the rule: one expert, one place for each tap."""
