"""What a plan costs: the unfolded graph, added up from its parts, independently of any solver.

Ops and changes of placement that are alike, in blocks that are alike, are priced once and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from shardwright.errors import SolverError
from shardwright.planner.contract.plan_figures import Phase
from shardwright.planner.contract.transitions import Collective
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.phases import Pass
from shardwright.planner.cost.redistribution import Traffic
from shardwright.planner.graph.graph import Op
from shardwright.planner.strategies.op_strategies import OpShards, Strategy
from shardwright.planner.verify.check import Assignment, distinct, split_axes

Calls = Counter[Collective]
"""How often each collective is called."""


class Price(NamedTuple):
    """Bytes held, nanoseconds of all passes and of a backward pass where none is asked for."""

    bytes: int
    time: int
    backward: int


@dataclass(frozen=True)
class Bill:
    """Prices of a whole graph under a plan.

    Its figures raise a SolverError where the plan has a change of placement that the runtime cannot
    make.
    """

    costs: Costs
    assignment: Assignment

    @cached_property
    def price(self) -> Price:
        """What the workload costs."""
        held, runs = self.costs.holdings, self.costs.passes
        size = sum(held.bytes(n, self.assignment[n]) for n in held.names)
        time = sum(run.times * self.times[run.phase] for run in runs)
        if any(run.trains for run in runs):
            return Price(size, time, 0)
        spent = self.costs.redistributions.nanoseconds
        back = sum(n * spent(traffic)[1] for traffic, n in self.redistributions())
        return Price(size, time, back)

    @cached_property
    def times(self) -> dict[Phase, int]:
        """Nanoseconds of each phase of the workload, run once."""
        out: dict[Phase, int] = {}
        for run in self.costs.passes:
            spent = sum(n * self.op_times(op)[run.phase] for op, n in self.ops)
            for traffic, times in self.redistributions(run):
                ahead, back = self.costs.redistributions.nanoseconds(traffic)
                spent += times * (ahead + back * run.trains)
            out[run.phase] = spent
        return out

    def collectives(
        self, run: Pass | None = None
    ) -> tuple[Counter[Collective], Counter[Collective]]:
        """What is called in a forward and in a backward pass.

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
        """Changes of placement in a pass, and how many are alike; averaging gradients is one.

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
        for name in self.costs.holdings.stored:
            averaging = costs.averaging(name, self.assignment[name])
            if averaging is not None:
                out.append((averaging, 1))
        return out

    @cached_property
    def ops(self) -> list[tuple[Op, int]]:
        """One of each that are alike, with how many they are."""
        return distinct(self.costs.graph, self.costs.states, self.assignment)

    def op_times(self, op: Op) -> Mapping[Phase, int]:
        """Nanoseconds of an op in each pass; of those that are alike one is priced."""
        at, names = self.costs.axes.axes.get(op.name), (*op.inputs, *op.outputs)
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
        """What a change of placement sends in a pass; None if nothing makes that change."""
        before, source, target = map(self.assignment.__getitem__, edge)
        return self.costs.redistributions.inner(edge[1], before, source, target, run)[0]

    def _strategy(self, op: Op) -> Strategy:
        have = tuple(self.assignment[n] for n in (*op.inputs, *op.outputs))
        rule = self.costs.axes.rules.get(op.name)
        split: OpShards | str = frozenset()
        if rule is not None:
            sides = (*rule.operands, *rule.results)
            split = split_axes(rule, sides, have, self.costs.states, op)
        return Strategy(have, frozenset() if isinstance(split, str) else split)

    @cached_property
    def _changes(self) -> list[tuple[tuple[str, str, str], bool, int]]:
        """Changes of placement, whether of weights that no rank sends, and how many are alike."""
        stays = self.costs.holdings.stored.keys() - self.costs.gathered
        tensors = self.costs.graph.tensors
        state, alike = self.assignment, self.costs.sizes.alike
        found: dict[object, list[Any]] = {}
        for edge in self.costs.redistributions.edges:
            before, source, target = edge
            priced = target not in self.costs.redistributions.unpriced
            key = (
                priced,
                alike(source), tensors[source].dtype, tensors[source].differentiable,
                source in stays, state[before], state[source], state[target],
            )  # fmt: skip
            if key in found:
                found[key][1] += priced
            else:
                found[key] = [edge, int(priced)]
        return [(edge, edge[1] in stays, times) for edge, times in found.values()]
