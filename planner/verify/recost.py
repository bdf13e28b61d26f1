"""What a plan costs: the whole graph, added up from its parts, independently of any solver.

Ops and changes of placement that are alike, in blocks that are alike, are priced once and counted.
"""

from __future__ import annotations

from collections import Counter
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
            spent = sum(
                n * self.costs.ops.once(op, strategy, run) for op, strategy, n in self._strategies
            )
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
        for (before, source, target), stays, times in self._changes:
            states = (self.assignment[before], self.assignment[source], self.assignment[target])
            traffic, _ = costs.inner(source, *states, run)
            if traffic is None or (stays and traffic.forward):
                raise SolverError(
                    f"the plan takes '{source}' from {states[1]} to {states[2]}, "
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

    @cached_property
    def _strategies(self) -> list[tuple[Op, Strategy, int]]:
        """The same, with how they run."""
        return [(op, self.strategy(op), times) for op, times in self.ops]

    def strategy(self, op: Op) -> Strategy:
        """How an op runs."""
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
