"""Breaks the predicted time and collectives of a plan down to the elements of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

from shardwright.planner.contract.plan_figures import CollectiveCount, Phase
from shardwright.planner.cost.redistribution_costs import Traffic
from shardwright.planner.devices.device import Device
from shardwright.planner.emit.elements import Elements
from shardwright.planner.emit.prediction import tally
from shardwright.planner.graph.graph import Op
from shardwright.planner.verify.recost import Bill, Calls


class Cost:
    """The time and collectives of an element or block, and the time of its ops."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ns: Counter[Phase] = Counter()
        self.calls: defaultdict[str, Calls] = defaultdict(Calls)
        self.slowest: Counter[tuple[str, str]] = Counter()

    def counted(self) -> list[CollectiveCount]:
        """Return the collectives by phase and kind."""
        return tally({p: self.calls[p] for p in ("forward", "backward", "decode")}, self.device)


class CostBreakdown:
    """Distributes a bill over the elements of a run. The costs add up to the bill.

    Args:
        elements: The elements of the run.
        bill: The bill of the run.
        averages: `prediction.averages` of the whole model.

    Attributes:
        device: The device that is priced.
        elements: The cost of each element.
        aside: Enclosing blocks -> the cost that belongs to no element.
    """

    def __init__(self, elements: Elements, bill: Bill, averages: Calls) -> None:
        self.bill, self.passes = bill, bill.costs.passes
        self.device = bill.costs.redistributions.device
        new = partial(Cost, self.device)
        self.aside: defaultdict[tuple[str, ...], Cost] = defaultdict(new)
        self.elements = [new() for _ in elements.found]
        self._edges = {edge[2]: edge for edge in bill.costs.redistributions.edges}
        for cost, element in zip(self.elements, elements.found, strict=True):
            if element.boundary is not None:
                self._add_edge(cost, element.boundary.target)
            for op in element.ops:
                self._add_op(cost, op)
        for chain, op in elements.aside:
            self._add_op(self.aside[chain], op)
        drawn = {e.boundary.target for e in elements.found if e.boundary is not None}
        for boundary in elements.graph.boundaries:  # boundaries that belong to no element
            if boundary.target not in drawn:
                around = elements.blocks.around(boundary.module)
                self._add_edge(self.aside[around], boundary.target)
        self._add_weights(elements)
        self._add_travelling(elements)
        self.aside[("",)].calls["backward"] += averages
        if wait := bill.costs.redistributions.averaging_latency:
            self.aside[("",)].ns["train"] += wait

    def _add_op(self, cost: Cost, op: Op) -> None:
        for phase, ns in self.bill.op_times(op).items():
            cost.ns[phase] += ns
            cost.slowest[op.call.op, op.source] += ns

    def _add_edge(self, cost: Cost, target: str, times: int = 1) -> None:
        """Add the redistribution that makes the tensor `target`."""
        if target not in self.bill.costs.redistributions.unpriced:
            made = [self.bill.traffic(self._edges[target], run) for run in self.passes]
            self._add(cost, made, times)

    def _add(self, cost: Cost, made: Sequence[Traffic | None], times: int = 1) -> None:
        """Add the time and collectives of the traffic in each pass."""
        for i, (run, traffic) in enumerate(zip(self.passes, made, strict=True)):
            assert traffic is not None, "the bill has its price"
            ahead, back = self.bill.costs.redistributions.nanoseconds(traffic)
            cost.ns[run.phase] += times * (ahead + back * run.trains)
            if i == 0:
                calls = {"forward": traffic.forward, "backward": traffic.backward}
            else:
                calls = {"decode": traffic.forward} if run.phase == "decode" else {}
            for phase, found in calls.items():
                for call in found:
                    cost.calls[phase][call] += times

    def _add_weights(self, elements: Elements) -> None:
        """Add the redistributions of parameters from storage to use, and gradient averaging."""
        costs, readings = self.bill.costs, elements.graph.readings()
        reader: dict[str, Cost] = {}
        for use in elements.graph.uses:
            at = elements.readers.get(use.used)
            cost = self.aside[("",)] if at is None else self.elements[at]
            reader.setdefault(use.stored, cost)
            self._add_edge(cost, use.used, max(readings[use.used], 1))
        for name in costs.holdings.stored:
            averaging = costs.redistributions.averaging(name, self.bill.assignment[name])
            if averaging is not None:
                self._add(reader[name], [averaging] * len(self.passes))

    def _add_travelling(self, elements: Elements) -> None:
        """Add the tokens that travel to their experts, to the element that reads them first."""
        costs = self.bill.costs.redistributions
        every = reversed([*zip(self.elements, elements.found, strict=True)])
        reader = {n: cost for cost, e in every for op in e.ops for n in op.inputs}
        for name in sorted(costs.travellers):
            state = self.bill.assignment[name]
            sent = [costs.travelling(name, state, run) for run in self.passes]
            self._add(reader.get(name, self.aside[("",)]), sent)
