"""Adds up the costs of a plan on the unfolded graph, independently of any solver.

Equal ops and equal redistributions are priced once and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from shardwright.errors import SolverError
from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_figures import Phase
from shardwright.planner.contract.transitions import Collective
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.phases import Pass
from shardwright.planner.cost.redistribution_costs import Traffic
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.strategies.op_strategies import Strategy
from shardwright.planner.strategies.states import States
from shardwright.planner.units import human_bytes
from shardwright.planner.verify.check import Assignment, distinct, split_axes

Calls = Counter[Collective]
"""How often each collective is called."""


class Price(NamedTuple):
    """Bytes held, nanoseconds of all passes, and of a backward pass if the workload has none."""

    bytes: int
    time: int
    backward: int


@dataclass(frozen=True)
class Bill:
    """Prices of a graph under a plan.

    Its figures raise a SolverError if the plan has a redistribution that the runtime cannot do.
    """

    costs: Costs
    assignment: Assignment

    @cached_property
    def price(self) -> Price:
        """The price of the workload."""
        held, runs = self.costs.holdings, self.costs.passes
        size = sum(held.bytes(n, self.assignment[n]) for n in held.names)
        time = sum(run.times * self.times[run.phase] for run in runs)
        if any(run.trains for run in runs):
            return Price(size, time, 0)
        spent = self.costs.redistributions.nanoseconds
        back = sum(n * spent(traffic)[1] for traffic, n in self.redistributions())
        return Price(size, time, back)

    @property
    def first_run(self) -> Bill:
        """The bill of the first run alone. With one run, this is the bill itself.

        A parameter that the first run does not read is held as it is stored, and has no gradient.
        """
        return self._of_first_run or self

    @cached_property
    def _of_first_run(self) -> Bill | None:
        before, whole = self.costs, self.costs.graph
        graph = whole.first_run()
        if graph is whole:
            return None
        states = States(
            graph,
            before.axes,
            before.states.ranks,
            before.states.replaceable,
            sequence=before.states.sequence,
            sub=before.states.sub,
        )
        keys = before.sizes.keys.within(graph)
        given = before.workload, before.caches, before.gathered, keys
        costs = Costs(graph, before.axes, states, *given)
        read = {n for op in graph.ops for n in op.inputs} | {b.source for b in graph.boundaries}
        idle = {u.used: self.assignment[u.stored].in_copy for u in graph.uses if u.used not in read}
        return Bill(costs, {n: self.assignment[n] for n in graph.tensors} | idle)

    @cached_property
    def times(self) -> dict[Phase, int]:
        """Nanoseconds of one run of each phase of the workload."""
        out: dict[Phase, int] = {}
        for run in self.costs.passes:
            spent = sum(n * self.op_times(op)[run.phase] for op, n in self.ops)
            for traffic, times in self.redistributions(run):
                ahead, back = self.costs.redistributions.nanoseconds(traffic)
                spent += times * (ahead + back * run.trains)
            out[run.phase] = spent + run.trains * self.costs.redistributions.averaging_latency
        return out

    def collectives(
        self, run: Pass | None = None
    ) -> tuple[Counter[Collective], Counter[Collective]]:
        """Return the collectives of a forward and of a backward pass, with their counts.

        Args:
            run: The pass, by default the workload's first.
        """
        forward, backward = Calls(), Calls()
        for traffic, times in self.redistributions(run):
            for call in traffic.forward:
                forward[call] += times
            for call in traffic.backward:
                backward[call] += times
        return forward, backward

    def redistributions(self, run: Pass | None = None) -> list[tuple[Traffic, int]]:
        """Return the traffic of all redistributions in a pass, including averaging, with counts.

        Args:
            run: The pass, by default the workload's first.
        """
        out: list[tuple[Traffic, int]] = []
        costs = self.costs.redistributions
        for edge, stays, times in self._changes:
            traffic = self.traffic(edge, run)
            if traffic is None or (stays and traffic.forward):
                _, source, target = map(self.assignment.__getitem__, edge)
                raise SolverError(
                    f"the plan takes '{edge[1]}' from {source} to {target}, "
                    "which no collective does"
                )
            if times:
                out.append((traffic, times))
        state, here = self.assignment, run or self.costs.passes[0]
        averaged = (costs.averaging(name, state[name]) for name in self.costs.holdings.stored)
        out += [(traffic, 1) for traffic in averaged if traffic is not None]
        sent = (costs.travelling(name, state[name], here) for name in sorted(costs.travellers))
        return [*out, *((traffic, 1) for traffic in sent)]

    @cached_property
    def ops(self) -> list[tuple[Op, int]]:
        """One op of each set of equal ops, with the size of the set."""
        return distinct(self.costs.graph, self.costs.states, self.assignment)

    def op_times(self, op: Op) -> Mapping[Phase, int]:
        """Return the nanoseconds of an op in each phase. Equal ops are priced once."""
        at, names = self.costs.axes.rule_axes.get(op.name), (*op.inputs, *op.outputs)
        key = op.name if at is None else id(at), *(id(self.assignment[n]) for n in names)
        if key not in self._op_times:
            strategy = self._strategy(op)
            once, passes = self.costs.ops.once, self.costs.passes
            self._op_times[key] = {run.phase: once(op, strategy, run) for run in passes}
        return self._op_times[key]

    @cached_property
    def _op_times(self) -> dict[object, Mapping[Phase, int]]:
        return {}

    def traffic(self, edge: tuple[str, str, str], run: Pass | None = None) -> Traffic | None:
        """Return the traffic of a redistribution in a pass; None if it is not possible."""
        before, source, target = map(self.assignment.__getitem__, edge)
        found = self.costs.redistributions.inner(edge[1], before, source, target, run)
        again = (run or self.costs.passes[0]).trains and edge[2] in self.costs.recomputation.again
        return found.repeated() if found is not None and again else found

    def _strategy(self, op: Op) -> Strategy:
        have = tuple(self.assignment[n] for n in (*op.inputs, *op.outputs))
        rule = self.costs.axes.rules.get(op.name)
        if rule is None:
            return Strategy(have)
        split = split_axes((*rule.operands, *rule.results), have, self.costs.states, op)
        return Strategy(have) if isinstance(split, str) else Strategy(have, split)

    @cached_property
    def _changes(self) -> list[tuple[tuple[str, str, str], bool, int]]:
        """Distinct redistributions: edge, whether a forward collective is forbidden, and count."""
        stays = self.costs.holdings.stored.keys() - self.costs.gathered
        tensors, again = self.costs.graph.tensors, self.costs.recomputation.again
        state, alike = self.assignment, self.costs.sizes.alike
        found: dict[object, list[Any]] = {}
        for edge in self.costs.redistributions.edges:
            before, source, target = edge
            priced = target not in self.costs.redistributions.unpriced
            key = (
                priced,
                alike(source), tensors[source].dtype, tensors[source].differentiable,
                source in stays, state[before], state[source], state[target], target in again,
            )  # fmt: skip
            if key in found:
                found[key][1] += priced
            else:
                found[key] = [edge, int(priced)]
        return [(edge, edge[1] in stays, times) for edge, times in found.values()]


NAMED = 3
"""Most parameters that `largest` names."""


def largest(graph: Graph, costs: Costs, assignment: Assignment) -> str:
    """Return the parameters with most bytes on a rank in words, summed over equal layers."""
    sizes, whole = Counter[str](), set[str]()
    for stored, fqn in {use.stored: use.fqn for use in reversed(graph.uses)}.items():
        name, state = pattern(fqn), assignment[stored]
        sizes[name] += graph.times(stored) * costs.sizes.at_rest(stored, state)
        if not state.shards and stored not in costs.sizes.spread:
            whole.add(name)
    ordered = sorted(sizes, key=lambda name: (-sizes[name], name))[:NAMED]
    words = [
        f"{name} {human_bytes(sizes[name])} ({'whole' if name in whole else 'split'})"
        for name in ordered
    ]
    return ", ".join(words)
