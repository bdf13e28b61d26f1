"""What a placement costs: whole numbers of nanoseconds and bytes, for a stated workload and device.

`planner/devices/device.py` says what a collective takes and what arithmetic and memory traffic
take; the parts here say how many bytes and operations there are, in each pass that the workload
makes.
"""

from __future__ import annotations

from functools import cached_property

from shardwright.planner.contract.plan_figures import Workload
from shardwright.planner.cost.holdings import Holdings
from shardwright.planner.cost.redistribution import RedistributionCosts
from shardwright.planner.cost.roofline import OpCosts
from shardwright.planner.cost.sizes import TensorSizes
from shardwright.planner.devices.device import device
from shardwright.planner.graph.axes import Axes
from shardwright.planner.graph.graph import Graph
from shardwright.planner.graph.kv_cache import Keys
from shardwright.planner.strategies.states import States


class Costs:
    """Prices of one graph, by what they are of.

    Args:
        graph: The traced model.
        axes: Its refined dims.
        states: Domains and strategies.
        workload: What is priced.
        caches: Whether the model generates, and so keeps the keys and values of earlier tokens.
        gathered: Stored tensors that may be gathered as they are read; others stay where they are.
        keys: Which dims count keys of attention, where it is known from another graph.

    Attributes:
        sizes: Lengths and bytes of tensors.
        redistributions: What changes of placement take.
        ops: What ops take.
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
    ) -> None:
        self.graph, self.axes, self.states, self.workload = graph, axes, states, workload
        self.caches, self.gathered = caches, gathered
        on = device(workload.device)
        self.sizes = TensorSizes(graph, axes, states.sub, workload, keys)
        self.redistributions = RedistributionCosts(graph, states, self.sizes, workload, on)
        self.ops = OpCosts(graph, self.sizes, on)
        self.passes = self.sizes.passes

    @cached_property
    def holdings(self) -> Holdings:
        """What is held of each tensor."""
        return Holdings(self.graph, self.sizes, self.workload, self.caches)
