"""The roofline cost of ops: the longer of arithmetic time and memory time, in each pass.

In training a differentiated op counts three times: a matrix product has two in the backward pass.
Ops that are computed again there count once more.
Each op takes some time, however little it does.
"""

from __future__ import annotations

from functools import cached_property
from math import prod

from shardwright.planner.contract.names import dtype_name
from shardwright.planner.cost.phases import Pass
from shardwright.planner.cost.recomputation import Recomputation
from shardwright.planner.cost.tensor_sizes import TensorSizes
from shardwright.planner.devices.device import Device
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.graph.kv_cache import ATTENTION
from shardwright.planner.graph.views import is_view
from shardwright.planner.strategies.op_strategies import Strategy

ONE_AT_A_TIME = ("_grouped_mm", "transformers::grouped_mm_fallback", "convolution")
"""Ops whose results use one index of the rule's axes x: one expert, one position for each tap."""


class OpCosts:
    """Prices the ops of one graph on a device."""

    def __init__(
        self, graph: Graph, sizes: TensorSizes, device: Device, recomputation: Recomputation
    ) -> None:
        self.graph, self.sizes, self.device = graph, sizes, device
        self.recomputation = recomputation
        self.speed = sizes.workload.speed

    @cached_property
    def of_experts(self) -> dict[str, int]:
        """Modules that compute with experts that are spread -> how often for each token."""
        spread = self.sizes.spread
        return {op.module: spread[n][2] for op in self.graph.ops for n in op.inputs if n in spread}

    def compute(self, op: Op, strategy: Strategy) -> int:
        """Return the nanoseconds of `op` in `strategy` on one rank, in all passes."""
        return sum(run.times * self.once(op, strategy, run) for run in self.sizes.passes)

    def once(self, op: Op, strategy: Strategy, run: Pass) -> int:
        """Return the nanoseconds of `op` in one pass; a view takes none."""
        if is_view(op.call) or not op.outputs or not self.graph.priced(op):
            return 0
        trained = run.trains and any(self.graph.tensors[n].differentiable for n in op.outputs)
        again = run.trains and not self.recomputation.again.isdisjoint(op.outputs)
        factor = (3 if trained else 1) + again
        flops, traffic = self.flops(op, strategy, run), self.traffic(op, strategy, run)
        if op.module in self.of_experts:
            most = self.sizes.workload.imbalance * self.of_experts[op.module]
            flops, traffic = int(flops * most), int(traffic * most)
        dtype = dtype_name(op.call.result_dtypes[0])
        time = self.device.compute(factor * flops, factor * traffic, dtype, factor)
        return time if self.speed == 1 else int(time / self.speed)

    def traffic(self, op: Op, strategy: Strategy, run: Pass) -> int:
        """Return the bytes that `op` reads and writes."""
        rule = self.sizes.axes.rules.get(op.name)
        found = [self.sizes.traffic_at(op, i, s, run) for i, s in enumerate(strategy.states)]
        traffic, made = sum(found), sum(found[len(op.inputs) :])
        if rule is not None and rule.lookup:  # a lookup reads only the rows that it returns
            traffic = min(traffic, 2 * made)
            if any(x in rule.lookup for x, _, _ in strategy.split):
                traffic += 2 * made  # the rows of other ranks are cleared
        return traffic

    def flops(self, op: Op, strategy: Strategy, run: Pass) -> int:
        """Return the operations of the matrix products in `op`; 0 for ops bound by memory."""
        sizes, axes = self.sizes, self.sizes.axes
        rule = axes.rules.get(op.name)
        if rule is None or not (rule.sum or op.call.op in ATTENTION):
            return 0
        cut = {x: frozenset((a, m) for y, a, m in strategy.split if y == x) for x in rule.axes()}
        keys = sizes.keys.letters.get(op.name, ()) if run.keys != run.queries else ()
        lengths = {
            x: sizes.length(d, cut[x], run, x in keys) for x, d in axes.rule_axes[op.name].items()
        }
        if op.call.op in ATTENTION:  # queries times keys, then weights times values
            d, e = lengths.pop("d"), lengths.pop("e")
            return 2 * prod(lengths.values()) * (d + e)
        if op.call.op in ONE_AT_A_TIME:
            lengths = {x: n for x, n in lengths.items() if not x.startswith("x")}
        return 2 * prod(lengths.values())
