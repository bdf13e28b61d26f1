"""`Costs`: prices of placements in integer nanoseconds and bytes, for one workload and device.

`planner/devices/device.py` has the times of collectives, arithmetic and memory traffic. The modules
here count the bytes and operations in each pass of the workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from shardwright.planner.contract.plan_figures import Workload
from shardwright.planner.cost.holdings import Holdings
from shardwright.planner.cost.recomputation import recomputation
from shardwright.planner.cost.redistribution_costs import RedistributionCosts
from shardwright.planner.cost.roofline import OpCosts
from shardwright.planner.cost.tensor_sizes import TensorSizes
from shardwright.planner.devices.device import device
from shardwright.planner.graph.axes import Axes
from shardwright.planner.graph.graph import Graph
from shardwright.planner.graph.kv_cache import Keys
from shardwright.planner.strategies.states import States


class Costs:
    """Prices of one graph.

    Args:
        graph: The traced model.
        axes: Its refined dims.
        states: Domains of its tensors.
        workload: The workload.
        caches: Whether the model generates tokens, and so has a KV cache.
        gathered: Stored tensors that may be all-gathered at each use.
        keys: What depends on lengths, if known from another graph.
        copies: Of a folded graph: activation -> how many of its copies autograd keeps.

    Attributes:
        sizes: Lengths and bytes of tensors.
        recomputation: What autograd keeps, and what runs again in the backward pass.
        redistributions: Costs of redistributions.
        ops: Costs of ops.
    """

    def __init__(
        self,
        graph: Graph,
        axes: Axes,
        states: States,
        workload: Workload,
        caches: bool = False,
        gathered: frozenset[str] = frozenset(),
        keys: Keys | None = None,
        copies: Mapping[str, int] | None = None,
    ) -> None:
        self.graph, self.axes, self.states, self.workload = graph, axes, states, workload
        self.caches, self.gathered, self.copies = caches, gathered, copies
        on = device(workload.device)
        self.sizes = TensorSizes(graph, axes, states.sub, workload, keys, workload.slowest)
        self.recomputation = recomputation(graph, workload.recomputed)
        given = graph, states, self.sizes, workload, on, self.recomputation
        self.redistributions = RedistributionCosts(*given)
        self.ops = OpCosts(graph, self.sizes, on, self.recomputation)
        self.passes = self.sizes.passes
        self._held: dict[int | None, Holdings] = {}

    @property
    def holdings(self) -> Holdings:
        """The bytes held of each tensor on the rank that has least room."""
        return self.held_by(self.workload.tightest)

    @cached_property
    def least_bytes(self) -> int:
        """The fewest bytes that a rank may hold, if each tensor is in its own best state."""
        held, domain = self.holdings, self.states.domain
        return sum(min(held.bytes(n, s) for s in domain(n)) for n in held.names)

    def held_by(self, rank: int | None) -> Holdings:
        """Return the bytes held of each tensor on a rank of tp; None is the one that holds most."""
        if rank not in self._held:
            at = self.sizes
            if rank != at.rank:
                at = TensorSizes(self.graph, self.axes, at.sub, self.workload, at.keys, rank)
            self._held[rank] = Holdings(
                self.graph, at, self.workload, self.caches, self.recomputation, self.copies
            )
        return self._held[rank]
