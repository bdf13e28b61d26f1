"""Builds the solver's problem of a graph: a variable per tensor; a factor per op, boundary and use.

Tensors are redistributed only where the runtime can act: at boundaries of modules, and between a
parameter as it is stored and as its module uses it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import TypeVar

from shardwright.planner.contract.names import made_once, pattern
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.redistribution_costs import TransitionCost
from shardwright.planner.graph.graph import ATTENDS, KEEPS, Boundary, Graph, crossed, once_a_graph
from shardwright.planner.graph.marks import Demand
from shardwright.planner.graph.repeated_calls import Sizes, repeats
from shardwright.planner.problem.axis_variables import axis_variables
from shardwright.planner.solvers.problem import Problem, Row
from shardwright.planner.strategies.op_strategies import Strategies
from shardwright.planner.strategies.state import REPLICATED, State
from shardwright.planner.strategies.states import States

COMPONENTS = ("bytes", "time", "backward", "actions", "tie")
"""Bytes held; nanoseconds of all passes; nanoseconds of a backward pass if the workload has none;
redistributions; and a hash of names, which breaks ties so that plans are deterministic."""
BYTES, TIME, BACKWARD, ACTIONS, TIE = range(5)

T = TypeVar("T")
Vector = tuple[int, ...]
FREE: Vector = (0,) * len(COMPONENTS)
NO_TRANSITION_COST = TransitionCost(0, 0)

MEETS: Mapping[Demand, Callable[[State], bool]] = {
    Demand.REPLICATED: lambda state: state == REPLICATED,
    Demand.READABLE: lambda state: not state.shards and not state.partial,
    Demand.SUMMED: lambda state: not state.partial,
}
"""The states that meet the demand of a mark on one tensor."""


@dataclass
class CostFunctionNetwork:
    """A problem, and the variable of each tensor."""

    problem: Problem
    variables: dict[str, int]
    states: States
    movable: int = 0
    """Least bytes of the parameters that may be sharded. The slack of bytes is a share of this."""

    def copy(self) -> CostFunctionNetwork:
        """Return a copy, to which factors can be added."""
        problem = replace(self.problem, factors=[*self.problem.factors])
        return replace(self, problem=problem)

    def allow(self, label: str, name: str, allows: Callable[[State], bool]) -> None:
        """Add a factor that forbids the other states of a tensor."""
        rows = [Row((i,), FREE) for i, s in enumerate(self.states.domain(name)) if allows(s)]
        self.problem.factor(label, [self.variables[name]], rows)

    def allow_pairs(
        self, label: str, one: str, other: str, allows: Callable[[State, State], bool]
    ) -> None:
        """Add a factor that forbids the other pairs of states of two tensors."""
        domains = [list(enumerate(self.states.domain(n))) for n in (one, other)]
        rows = [Row((i, j), FREE) for (i, s), (j, t) in product(*domains) if allows(s, t)]
        self.problem.factor(label, [self.variables[n] for n in (one, other)], rows)

    def assignment(self, values: tuple[int, ...]) -> dict[str, State]:
        """Return the state of each tensor for the values of the variables."""
        return {name: self.states.domain(name)[values[v]] for name, v in self.variables.items()}


def build_network(
    graph: Graph,
    states: States,
    costs: Costs,
    rigid: frozenset[str] = frozenset(),
    wider: CostFunctionNetwork | None = None,
) -> CostFunctionNetwork:
    """Return the problem of choosing a state for every tensor of `graph`.

    Args:
        graph: The traced model. Tensors that are alike have one variable, and the cost of a folded
            block counts once for each of its copies in the full model.
        states: Domains of the tensors.
        costs: Prices.
        rigid: Modules at whose boundaries no tensor may be redistributed.
        wider: The same problem with more states, whose factors are narrowed instead of made anew.
    """
    builder = _Builder(graph, states, costs)
    if wider is not None:
        builder.narrow(wider)
    else:
        builder.add_demands()
        builder.add_stores()
        builder.add_ops()
        builder.add_uses()
        builder.add_boundaries(rigid)
        builder.add_repeats()
    return CostFunctionNetwork(builder.problem, builder.variables, states, builder.movable())


class _Builder:
    """The problem under construction; `index` has the number of each state in a tensor's domain."""

    def __init__(self, graph: Graph, states: States, costs: Costs) -> None:
        self.graph, self.states, self.costs = graph, states, costs
        self.problem = Problem(COMPONENTS)
        self.variables: dict[str, int] = {}
        self.index: dict[str, dict[State, int]] = {}
        numbered: dict[int, dict[State, int]] = {}
        for name, parts in axis_variables(graph, states).items():
            domain = states.domain(name)
            self.variables[name] = self.problem.variable(name, len(domain), parts)
            if id(domain) not in numbered:  # many tensors share a domain
                numbered[id(domain)] = {s: i for i, s in enumerate(domain)}
            self.index[name] = numbered[id(domain)]
        for name, one in graph.alike.items():
            self.variables[name], self.index[name] = self.variables[one], self.index[one]

    def scope(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the variables of these tensors."""
        return tuple(self.variables[n] for n in names)

    def added_up(
        self, found: Iterable[tuple[tuple[str, ...], T, int]]
    ) -> dict[tuple[int, ...], tuple[T, int]]:
        """Merge (tensors, item, times) with the same variables: the first item, times added up."""
        out: dict[tuple[int, ...], tuple[T, int]] = {}
        for names, thing, times in found:
            scope = self.scope(names)
            first, before = out.get(scope, (thing, 0))
            out[scope] = first, before + times
        return out

    def unary(self, name: str, label: str, price: Mapping[State, Vector]) -> None:
        """Add a factor over the state of one tensor. States without a price are forbidden."""
        index = self.index[name]
        rows = [Row((index[s],), c) for s, c in price.items() if s in index]
        self.problem.factor(f"{label} {name}", self.scope([name]), rows)

    def same(self, label: str, one: str, other: str) -> None:
        """Add a factor: two tensors have the same state."""
        index = self.index[other]
        pairs = ((i, index[s]) for s, i in self.index[one].items() if s in index)
        self.problem.factor(label, self.scope((one, other)), [Row(p, FREE) for p in pairs])

    def narrow(self, wider: CostFunctionNetwork) -> None:
        """Add the factors of a network with more states, without the rows of these."""
        numbers: dict[int, dict[int, int]] = {}
        for name, variable in self.variables.items():
            before, index = wider.states.domain(name), self.index[name]
            if len(index) < len(before):
                numbers[variable] = {i: index[s] for i, s in enumerate(before) if s in index}
        for factor in wider.problem.factors:
            rows = factor.rows
            for place, variable in enumerate(factor.scope):
                if (new := numbers.get(variable)) is not None:
                    rows = [
                        Row((*x[:place], new[x[place]], *x[place + 1 :]), costs)
                        for x, costs in rows
                        if x[place] in new
                    ]
            self.problem.factor(factor.name, factor.scope, rows)

    def movable(self) -> int:
        """Return `CostFunctionNetwork.movable`."""
        held, stored = self.costs.holdings, {u.stored for u in self.graph.uses}
        domains = {n: self.states.domain(n) for n in held.names if n in stored}
        several = ((n, domain) for n, domain in domains.items() if len(domain) > 1)
        return sum(min(held.bytes(n, s) for s in domain) for n, domain in several)

    def add_demands(self) -> None:
        """Add the demands of outputs, hidden states and marks, and the costs that break ties."""
        graph = self.graph
        for name, label in tie_names(graph).items():
            times = graph.times(name)
            hashes = {
                s: zlib.crc32(f"{label} {i}".encode()) % 4096 for s, i in self.index[name].items()
            }
            self.unary(name, "tie", {s: (0, 0, 0, 0, times * h) for s, h in hashes.items()})
        for name in dict.fromkeys(graph.outputs):
            self.unary(name, "output", {REPLICATED: FREE})
        for kind, demand, names in graph.marks.demands():
            if demand is Demand.ONE_STATE:
                for one, other in pairwise(names):
                    self.same(f"{kind} {one}", one, other)
                continue
            for name in names:
                domain = self.states.domain(name)
                self.unary(name, kind, {s: FREE for s in domain if MEETS[demand](s)})
        sequence = self.states.sequence
        for name, allowed in self.states.handed().items():
            must = sequence is not None and name in sequence.handed
            self.unary(name, "handed" if must else "carried", dict.fromkeys(allowed, FREE))

    def add_stores(self) -> None:
        """Add the bytes held, and the time to average gradients over copies of the model."""
        held, stored = self.costs.holdings, dict.fromkeys(u.stored for u in self.graph.uses)
        for name in held.names:
            domain = self.states.domain(name)
            self.unary(name, "held", {s: (held.bytes(name, s), 0, 0, 0, 0) for s in domain})
        for name in stored:
            times, domain = self.graph.times(name), self.states.domain(name)
            found = {s: self.costs.redistributions.averaging_cost(name, s) for s in domain}
            if any(any(cost) for cost in found.values()):
                self.unary(name, "averaged", {s: paid(c, 0, times) for s, c in found.items()})
        trained = sum(run.times * run.trains for run in self.costs.passes)
        if wait := trained * self.costs.redistributions.averaging_latency:
            name = next(iter(stored))  # whatever its state
            domain = self.states.domain(name)
            self.unary(name, "averaging", dict.fromkeys(domain, (0, wait, 0, 0, 0)))
        for name in self.costs.redistributions.travellers:
            times, domain = self.graph.times(name), self.states.domain(name)
            sent = {s: self.costs.redistributions.travelling_cost(name, s) for s in domain}
            self.unary(name, "travelling", {s: paid(c, 0, times) for s, c in sent.items()})

    def add_ops(self) -> None:
        """Add each op's strategies with their times. Ops with the same variables share a factor."""
        ops = (((*op.inputs, *op.outputs), op, self.graph.times(op.name)) for op in self.graph.ops)
        strategies = Strategies(self.states)
        for scope, (op, times) in self.added_up(ops).items():
            index = [self.index[n] for n in (*op.inputs, *op.outputs)]
            rows = [
                Row(
                    tuple([i[s] for i, s in zip(index, strategy.states, strict=True)]),
                    (0, times * self.costs.ops.compute(op, strategy), 0, 0, 0),
                )
                for strategy in strategies.of(op)
            ]
            self.problem.factor(f"op {op.name}", scope, rows)

    def add_uses(self) -> None:
        """Add the redistribution of each parameter from storage to use, once for each reading."""
        readings = self.graph.readings()
        uses = (
            ((u.stored, u.used), u, max(readings[u.used], self.graph.times(u.used)))
            for u in self.graph.uses
        )
        for scope, (use, times) in self.added_up(uses).items():
            rows, again = [], use.used in self.costs.recomputation.again
            for s, i in self.index[use.stored].items():
                for t, j in self.index[use.used].items():
                    traffic = self.costs.redistributions.traffic(use.stored, s, t)
                    cost = self.costs.redistributions.cost(use.stored, s, s, t, again)
                    if traffic is None or cost is None:
                        continue
                    looped = use.used in self.graph.marks.in_regions
                    if looped and (traffic.forward or traffic.backward):
                        continue
                    if not traffic.forward or use.stored in self.costs.gathered:
                        rows.append(Row((i, j), paid(cost, int(s.in_copy != t), times)))
            self.problem.factor(f"use {use.fqn}", scope, rows)

    def add_boundaries(self, rigid: frozenset[str]) -> None:
        """Add the possible redistributions at boundaries of modules, with their costs."""
        outer = self.graph.outer()
        found: list[tuple[tuple[str, ...], tuple[Boundary, tuple[str, ...]], int]] = []
        for boundary in self.graph.boundaries:
            names = crossed(boundary, outer.get(boundary.target))
            found.append((names, (boundary, names), self.graph.times(boundary.target)))
        known: dict[object, list[Row]] = {}
        for scope, ((boundary, names), times) in self.added_up(found).items():
            rigidly = boundary.module in rigid and boundary.side != KEEPS
            at, given = self._like(boundary, names), (boundary, names, rigidly, times)
            rows = made_once(known, (at, *given[2:]), partial(self._changes, *given))
            label = f"boundary {boundary.module} {boundary.side} {boundary.slot}"
            self.problem.factor(label, scope, rows)

    def _like(self, boundary: Boundary, names: tuple[str, ...]) -> object:
        """Return a key that is equal for boundaries with the same redistributions and costs."""
        marks, priced = self.graph.marks, self.graph.priced(boundary)
        looped = boundary.target in marks.in_regions
        return (
            *(id(self.index[n]) for n in names),
            self.states.dims(boundary.source),
            self.costs.redistributions.kind(boundary.source) if priced or looped else None,
            (priced, looped, boundary.target in marks.overwritten),
            (_action(boundary), boundary.side == ATTENDS and boundary.slot),
            boundary.target in self.costs.recomputation.again,
            boundary if self.states.sequence else None,
        )

    def _changes(
        self, boundary: Boundary, names: tuple[str, ...], rigidly: bool, times: int
    ) -> list[Row]:
        """Return the rows of possible redistributions at a boundary, between these tensors."""
        sequence, redistributions = self.states.sequence, self.costs.redistributions
        overwritten = boundary.target in self.graph.marks.overwritten
        looped = boundary.target in self.graph.marks.in_regions
        action, priced = _action(boundary), self.graph.priced(boundary)
        again = boundary.target in self.costs.recomputation.again
        rows = []
        for chosen in product(*(self.index[n].items() for n in names)):
            (s, _), (t, _) = chosen[-2:]
            before = chosen[0][0] if len(names) > 2 else s
            if rigidly and s != t:
                continue
            if sequence and sequence.misplaced(boundary, s.shards, t.shards):
                continue
            if boundary.side == ATTENDS and not self.states.attends(boundary.slot, s, t):
                continue
            if overwritten and not self.states.writable(s, t):
                continue
            if looped and redistributions.sends(boundary, before, s, t):
                continue
            change = boundary.source, before, s, t
            if priced:
                cost = redistributions.cost(*change, again)
            else:
                cost = NO_TRANSITION_COST if redistributions.possible(*change) else None
            if cost is not None:
                price = paid(cost, action * (s != t), times)
                rows.append(Row(tuple([i for _, i in chosen]), price))
        return rows

    def add_repeats(self) -> None:
        """Constrain repeated calls of a module: same redistribution in each, or none in any."""
        sizes = Sizes(self.graph, self.states.axes)
        for one, other in repeats(self.graph):
            label = f"again {self.graph.slot(one)}"
            ends = (one.source, one.target, other.source, other.target)
            shapes = [[d.size for d in self.states.axes.dims[n]] for n in ends]
            if shapes[0] == shapes[2]:  # then they have the same axes and can have the same states
                self.same(label, ends[0], ends[2])
                self.same(label, ends[1], ends[3])
                continue
            first, second, third, fourth = (self.index[n] for n in ends)
            alike = sizes.same(one.source, other.source)
            never = [(k, fourth[u]) for u, k in third.items() if u in fourth]
            rows = []
            for (s, i), (t, j) in product(first.items(), second.items()):
                same = [(third[s], fourth[t])] if alike and s in third and t in fourth else []
                rows += [Row((i, j, *pair), FREE) for pair in (never if s == t else same)]
            self.problem.factor(label, self.scope(ends), rows)


def _action(boundary: Boundary) -> int:
    """Return the tie-break cost of a redistribution here.

    It prefers the module that makes a tensor over a module without parameters, such as a dropout.
    """
    return 4 if not boundary.has_parameters else 2 if boundary.side == "out" else 3


def paid(cost: TransitionCost, action: int, times: int) -> Vector:
    """Return the cost vector of a redistribution that happens `times` times."""
    return (0, times * cost.time, times * cost.backward, times * action, 0)


@once_a_graph
def tie_names(graph: Graph) -> dict[str, str]:
    """Return a name for each tensor by its position in its module, the same in equal blocks.

    With it, ties between equally good plans are broken in the same way in all blocks.
    """
    places = {u.stored: (u.fqn, "stored") for u in graph.uses}
    places |= {u.used: (u.fqn, "used") for u in graph.uses}
    places |= {out: (op.module, "") for op in graph.ops for out in op.outputs}
    places |= {b.target: (b.module, f"{b.side} {b.slot}") for b in graph.boundaries}
    seen: Counter[tuple[str, str]] = Counter()
    out = {}
    for name in graph.tensors:
        module, where = places.get(name, ("", ""))
        seen[module, where] += 1
        out[name] = f"{pattern(module)} {where} {seen[module, where]}"
    return out
