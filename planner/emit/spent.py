"""What each element of a run takes of the time and the collectives that a plan predicts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from shardwright.planner.contract.plan_figures import CollectiveCount, Phase
from shardwright.planner.cost.phases import Pass
from shardwright.planner.cost.redistribution import Traffic
from shardwright.planner.emit.elements import Element, Elements
from shardwright.planner.emit.prediction import flags, tally
from shardwright.planner.graph.graph import Op
from shardwright.planner.verify.recost import Bill, Calls


class Spent:
    """Time and collectives of something, and the ops that take longest."""

    def __init__(self) -> None:
        self.ns: Counter[Phase] = Counter()
        self.calls: defaultdict[str, Calls] = defaultdict(Calls)
        self.slowest: Counter[tuple[str, str]] = Counter()

    def counted(self) -> list[CollectiveCount]:
        """The collectives, by phase and kind."""
        return tally({p: self.calls[p] for p in ("forward", "backward", "decode")})


class Spending:
    """Goes over a bill and says of each item whose it is: together they are the whole bill.

    Attributes:
        elements: What each element takes.
        aside: Blocks around -> what they take besides.
    """

    def __init__(self, elements: Elements, bill: Bill) -> None:
        self.bill, self.costs, self.state = bill, bill.costs, bill.assignment
        self.runs: list[Pass] = self.costs.passes
        self._known: dict[object, Mapping[Phase, int]] = {}
        self.aside: defaultdict[tuple[str, ...], Spent] = defaultdict(Spent)
        self.elements = [self._element(element) for element in elements.found]
        for chain, op in elements.aside:
            self._add_op(self.aside[chain], op)
        self._add_rest(elements)
        self._add_weights(elements)
        self.aside[("",)].calls["backward"] += flags(bill)

    def _element(self, element: Element) -> Spent:
        spent = Spent()
        if element.boundary is not None:
            self._add_edge(spent, element.boundary.target)
        for op in element.ops:
            self._add_op(spent, op)
        return spent

    def _add_op(self, spent: Spent, op: Op) -> None:
        at = self.costs.axes.axes.get(op.name)
        states = map(self.state.__getitem__, (*op.inputs, *op.outputs))
        key = (op.name if at is None else id(at), *map(id, states))
        if key not in self._known:
            strategy, once = self.bill.strategy(op), self.costs.ops.once
            self._known[key] = {r.phase: once(op, strategy, r) for r in self.runs}
        for phase, ns in self._known[key].items():
            spent.ns[phase] += ns
            spent.slowest[op.call.op, op.source] += ns

    def _add_edge(self, spent: Spent, target: str, times: int = 1) -> None:
        """Add the change of placement that makes a tensor."""
        if target in self.costs.redistributions.unpriced:
            return
        before, source, _ = self._edges[target]
        states = self.state[before], self.state[source], self.state[target]
        inner = self.costs.redistributions.inner
        self._add(spent, [inner(source, *states, run)[0] for run in self.runs], times)

    def _add(self, spent: Spent, made: Sequence[Traffic | None], times: int = 1) -> None:
        """Add what is sent and copied in each pass."""
        for i, (run, traffic) in enumerate(zip(self.runs, made, strict=True)):
            assert traffic is not None, "the bill has its price"
            ahead, back = self.costs.redistributions.nanoseconds(traffic)
            spent.ns[run.phase] += times * (ahead + back * run.trains)
            if i == 0:
                calls = {"forward": traffic.forward, "backward": traffic.backward}
            else:
                calls = {"decode": traffic.forward} if run.phase == "decode" else {}
            for phase, found in calls.items():
                for call in found:
                    spent.calls[phase][call] += times

    def _add_rest(self, elements: Elements) -> None:
        """Add changes that are no elements: of what is aside, or what nothing reads."""
        drawn = {e.boundary.target for e in elements.found if e.boundary is not None}
        for boundary in self.costs.graph.boundaries:
            if boundary.target not in drawn:
                chain = elements.places.chain(boundary.module)
                self._add_edge(self.aside[chain], boundary.target)

    def _add_weights(self, elements: Elements) -> None:
        """Add what happens between a parameter as it is stored and as it is used."""
        graph, readings = self.costs.graph, self.costs.graph.readings()
        reader: dict[str, Spent] = {}
        for use in graph.uses:
            at = elements.readers.get(use.used)
            spent = self.aside[("",)] if at is None else self.elements[at]
            reader.setdefault(use.stored, spent)
            self._add_edge(spent, use.used, max(readings[use.used], 1))
        for name in self.costs.holdings.stored:
            averaging = self.costs.redistributions.averaging(name, self.state[name])
            if averaging is not None:
                self._add(reader[name], [averaging] * len(self.runs))

    @cached_property
    def _edges(self) -> dict[str, tuple[str, str, str]]:
        """Changes of placement, by the tensor that they make."""
        return {edge[2]: edge for edge in self.costs.redistributions.edges}
