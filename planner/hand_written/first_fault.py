"""Finds the first op at which the placements of a hand-written table cannot go on.

The facts of a problem (pins, ops, boundaries) are taken one by one, in the order in which the code
runs. Each rules out placements. At the first fact that leaves some tensor none, the table is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.builder import FREE, CostFunctionNetwork
from shardwright.planner.solvers.presolve import prune
from shardwright.planner.solvers.problem import Factor, Row
from shardwright.planner.strategies.state import State


class Fact(NamedTuple):
    """The first fact that cannot hold: its kind and name, and what was possible before it.

    `tensors` are those that it is about, with the states that each had left.
    """

    kind: str
    name: str
    tensors: Mapping[str, list[State]]


def first_fault(graph: Graph, network: CostFunctionNetwork) -> Fact | dict[str, State]:
    """Return the first fact that rules out every placement.

    If there is none, return the placements that are left, one of each tensor.
    """
    narrowed = _Narrowed(network)
    for factor in _in_order(graph, network):
        before = {v: sorted(narrowed.left[v]) for v in factor.scope}
        if not narrowed.add(factor):
            kind, _, name = factor.name.partition(" ")
            names = [n for n, v in network.variables.items() if v in before]
            domains = {n: network.states.domain(n) for n in names}
            left = {n: [domains[n][i] for i in before[network.variables[n]]] for n in names}
            return Fact(kind, name, left)
    narrowed.complete()
    return network.assignment(tuple(map(min, narrowed.left)))


def holds(network: CostFunctionNetwork, placed: Mapping[str, State]) -> bool:
    """Whether every fact of a network holds for these placements."""
    at = {v: network.states.domain(n).index(placed[n]) for n, v in network.variables.items()}
    return all(f.row(tuple([at[v] for v in f.scope])) for f in network.problem.factors)


def without(network: CostFunctionNetwork, kinds: Collection[str]) -> CostFunctionNetwork:
    """Return the network without facts of these kinds."""
    factors = [f for f in network.problem.factors if f.name.partition(" ")[0] not in kinds]
    return replace(network, problem=replace(network.problem, factors=factors))


def of_values(network: CostFunctionNetwork) -> CostFunctionNetwork:
    """Return the network of values alone: gradients may be placed as they like."""
    first: list[list[int]] = [[] for _ in network.problem.domains]
    for name, variable in network.variables.items():
        at: dict[tuple[object, int], int] = {}
        domain = network.states.domain(name)
        first[variable] = [at.setdefault((s.shards, s.partial), i) for i, s in enumerate(domain)]
    factors = []
    for factor in network.problem.factors:
        picks = [first[v] for v in factor.scope]
        rows = {tuple([p[x] for p, x in zip(picks, r.values, strict=True)]) for r in factor.rows}
        factors.append(Factor(factor.name, factor.scope, [Row(r, FREE) for r in sorted(rows)]))
    return replace(network, problem=replace(network.problem, factors=factors))


def _in_order(graph: Graph, network: CostFunctionNetwork) -> list[Factor]:
    """Return the factors in the order in which the code meets them."""
    place = _places(graph, network)
    return sorted(
        network.problem.factors, key=lambda f: max((place.get(v, -1.0) for v in f.scope), default=0)
    )


def _places(graph: Graph, network: CostFunctionNetwork) -> dict[int, float]:
    """Return for each variable when its first tensor is made."""
    at: dict[str, float] = {}
    for i, op in enumerate(graph.ops):
        at |= dict.fromkeys(op.outputs, float(i))
    for boundary in graph.boundaries:  # outer ones come before inner ones
        at[boundary.target] = at.get(boundary.source, -1.0) + 2**-10
    out: dict[int, float] = {}
    for name, when in at.items():
        variable = network.variables[name]
        out[variable] = min(when, out.get(variable, when))
    return out


class _Narrowed:
    """The values that each variable has left under the factors that were added."""

    def __init__(self, network: CostFunctionNetwork) -> None:
        self.left = [set(range(len(d))) for d in network.problem.domains]
        self._factors: list[Factor] = []
        self._of: defaultdict[int, list[int]] = defaultdict(list)

    def complete(self) -> None:
        """Choose a value of each variable that has several left, where one can be chosen."""
        for variable in range(len(self.left)):
            left = sorted(self.left[variable])
            for value in left if len(left) > 1 else ():
                before = [*self.left], [factor.rows for factor in self._factors]
                self.left[variable] = {value}
                if prune(self.left, self._factors, self._of, self._of[variable]):
                    break
                self.left, rows = before
                for factor, kept in zip(self._factors, rows, strict=True):
                    factor.rows = kept

    def add(self, factor: Factor) -> bool:
        """Add a factor, and narrow until nothing changes; False if a variable has no value left."""
        for variable in factor.scope:
            self._of[variable].append(len(self._factors))
        self._factors.append(replace(factor))
        return prune(self.left, self._factors, self._of, [len(self._factors) - 1])
