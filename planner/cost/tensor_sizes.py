"""Lengths of dims and bytes of tensors, in each pass of a workload."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

from shardwright.planner.contract.names import made_once
from shardwright.planner.contract.plan_figures import Workload
from shardwright.planner.cost.phases import Pass, passes
from shardwright.planner.graph.axes import ATOM, Axes, Dim, find
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.graph.kv_cache import Keys, find_keys, last_of_two
from shardwright.planner.strategies.state import Cut, State, cut_of, mask_at
from shardwright.planner.strategies.sub_axes import SubAxes
from shardwright.rules.notation import letters


class TensorSizes:
    """Lengths and bytes of the tensors of one graph.

    Args:
        graph: The traced model.
        axes: Its refined dims.
        sub: The mesh as sub-axes.
        workload: The workload.
        keys: What depends on lengths, if known from another graph; by default found in this one.
        rank: The rank of tp whose parts are measured; by default the one that holds most.
    """

    def __init__(
        self,
        graph: Graph,
        axes: Axes,
        sub: SubAxes,
        workload: Workload,
        keys: Keys | None = None,
        rank: int | None = None,
    ) -> None:
        self.graph, self.axes, self.sub, self.rank = graph, axes, sub, rank
        self.workload, self.passes = workload, passes(workload)
        self.keys = keys or find_keys(graph, axes)
        self._bytes: dict[object, int] = {}
        self._at_rest: dict[object, int] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._alike: dict[str, int] = {}

    def alike(self, name: str) -> int:
        """Return a number that is equal for tensors with the same dims, as in copies of a block.

        With it, what depends only on the dims of a tensor is computed once.
        """
        if (found := self._alike.get(name)) is None:
            dims = tuple(find(dim).id for dim in self.axes.dims[name])
            found = self._alike[name] = self._numbers.setdefault(dims, len(self._numbers))
        return found

    def length(self, dim: Dim, cut: Cut, run: Pass | None, keys: bool = False) -> int:
        """Return the length of `dim` on the rank in a pass, with `cut` sharded; None is at rest.

        With `keys` the dim counts all tokens that attention attends to, not only the new ones.
        """
        dim = find(dim)
        if run is not None and dim.id in self.keys.run_time:
            tokens = run.keys if keys else run.queries
            word = self.keys.run_time[dim.id]
            size = {"batch": run.batch, "seq": tokens, "rows": run.batch * tokens}[word]
        elif dim.kind == ATOM:
            size = dim.size
        else:
            parts = [self.length(c, cut, run, keys) for c in dim.children]
            return prod(parts) if dim.kind == "product" else sum(parts)
        mask = mask_at(cut, dim.id)
        if run is not None and dim.id in self.keys.run_time:  # ranks share tokens evenly
            return -(-size // self.sub.size(mask))
        return self.sub.part(size, mask, self.rank) if mask else size

    def bytes(
        self, name: str, state: State, run: Pass | None = None, keys: frozenset[int] | None = None
    ) -> int:
        """Return the bytes of tensor `name` on the rank that holds most of it.

        Args:
            name: The tensor.
            state: Its state.
            run: The pass; by default the first of the workload.
            keys: Numbers of the dims that count keys; by default the last of a table of scores.
        """
        run = run or self.passes[0]
        itemsize = self.graph.tensors[name].dtype.itemsize
        at = (self.alike(name), itemsize, state.shards, run, keys)
        if at not in self._bytes:
            self._bytes[at] = self._measure(self.axes.dims[name], state, run, keys) * itemsize
        return self._bytes[at]

    def at_rest(self, name: str, state: State) -> int:
        """Return the bytes of a stored parameter or buffer on the rank that holds most.

        Copies of the model share a parameter out along its first dim.
        """
        tensor, dims = self.graph.tensors[name], self.axes.dims[name]
        at = self.alike(name), state.shards
        elements = made_once(self._at_rest, at, lambda: self._measure(dims, state))
        size = self.of_own_experts(name, tensor.stored_bytes(elements))
        if not state.shared or not dims:
            return size
        rows = self.length(dims[0], cut_of(state.shards, 0), None)
        return size // max(rows, 1) * -(-rows // self.workload.replicas)

    @cached_property
    def spread(self) -> dict[str, tuple[int, int, int]]:
        """The values of marks for parameters whose experts are spread, and views of these."""
        return dict(self.graph.marks.spread_experts)

    def of_own_experts(self, name: str, size: int) -> int:
        """Return the bytes of tensor `name` on the rank of `ep` that has most of its experts."""
        if (experts := self.spread.get(name)) is None:
            return size
        first, count, _ = experts
        return size // first * min(first, -(-count // self.workload.spread))

    def _measure(
        self,
        dims: Sequence[Dim],
        state: State,
        run: Pass | None = None,
        keys: frozenset[int] | None = None,
    ) -> int:
        if keys is None and run is not None and run.keys != run.queries:
            keys = last_of_two(dims, self.keys.counts_tokens)
        counts = keys or ()
        return prod(
            self.length(d, cut_of(state.shards, k), run, k in counts) for k, d in enumerate(dims)
        )

    def traffic_at(self, op: Op, i: int, state: State, run: Pass) -> int:
        """Return the bytes that `op` moves for operand or result number `i` in a pass.

        A quantized weight is read as it is stored, and its numbers are written and read.
        """
        size = self.bytes_at(op, i, state, run)
        if i < len(op.inputs):
            size = self.of_own_experts(op.inputs[i], size)
        if i >= len(op.inputs) or (tensor := self.graph.tensors[op.inputs[i]]).bits is None:
            return size
        return 2 * size + tensor.stored_bytes(size // tensor.dtype.itemsize)

    def bytes_at(self, op: Op, i: int, state: State, run: Pass) -> int:
        """Return the bytes of operand or result number `i` of `op` in a pass."""
        name, rule = (*op.inputs, *op.outputs)[i], self.axes.rules.get(op.name)
        found = self.keys.letters.get(op.name) if run.keys != run.queries else None
        if not found or rule is None:
            return self.bytes(name, state, run)
        exprs = (*rule.operands, *rule.results)[i]
        keys = {k for k, e in enumerate(exprs) if found & set(letters(e))}
        return self.bytes(name, state, run, frozenset(keys))
