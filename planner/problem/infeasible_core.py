"""Explains why a problem is infeasible: a minimal set of facts that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from shardwright.errors import InfeasibleError
from shardwright.planner.graph.graph import Graph
from shardwright.planner.graph.marks import KINDS
from shardwright.planner.problem.builder import CostFunctionNetwork
from shardwright.planner.problem.pins import Pin
from shardwright.planner.solvers.cores import core
from shardwright.planner.strategies.obstacles import place

WORDS = {
    "use": "a rank uses {0} as it stores it: weights do not travel",
    "carried": "a hidden state between blocks must be replicated",
    "handed": "a hidden state between blocks must be sharded along the sequence",
    "output": "an output of the model must be replicated",
    "said": "what the plan says of {0}",
    "unsummed": "the gradient of {0} is not summed over the ranks",
    **{name: kind.reason for name, kind in KINDS.items() if kind.reason},
}
BOUNDARIES = {
    "boundary": "the tensor that goes {0} cannot be redistributed as needed",
    "again": "the tensor that goes {0} must be redistributed in the same way in each call",
    "kept": "the table does not redistribute the tensor that goes {0}",
    "styled": "the table's style allows no other redistribution of the tensor that goes {0}",
}


class Fact(NamedTuple):
    """One of several statements that cannot all be true."""

    kind: str
    text: str


class Contradiction(InfeasibleError):
    """A problem has no solution. Why is found out, at some expense, when it is asked for."""

    def __init__(
        self, network: CostFunctionNetwork, graph: Graph, wanted: Mapping[str, Pin]
    ) -> None:
        super().__init__()
        self._problem = network, graph, wanted

    @cached_property
    def facts(self) -> list[Fact]:
        """A minimal set of facts that contradict each other; none if none is found in time."""
        network, graph, wanted = self._problem
        pinned = [f for f in network.problem.factors if f.name.startswith("pin ")]
        found = core(network.problem, seeds=pinned)
        return in_words([f.name for f in found or ()], graph, wanted)

    @property
    def reasons(self) -> list[str]:
        """The facts in words, without pins and uses."""
        return reasons(self.facts)

    def __str__(self) -> str:
        """Name the pins, and the ops against them."""
        pins = sorted({f.text for f in self.facts if f.kind == "pin"})
        if not self.facts:
            return "the rules contradict each other on this model: please report it"
        rest = "; ".join(self.reasons)
        if pins:
            verb = "cannot hold" if len(pins) == 1 else "cannot hold together"
            return f"{' and '.join(pins)} {verb}; what forbids it: {rest}"
        if any(f.kind == "handed" for f in self.facts):
            return f"sequence parallelism cannot hold on this model; what forbids it: {rest}"
        return f"the rules contradict each other at {rest}"


def reasons(facts: Sequence[Fact]) -> list[str]:
    """Return facts in words, without pins and uses."""
    return list(dict.fromkeys(f.text for f in facts if f.kind not in ("pin", "use")))


def in_words(names: Sequence[str], graph: Graph, wanted: Mapping[str, Pin]) -> list[Fact]:
    """Return the facts that the factors of these names stand for."""
    ops = {op.name: op for op in graph.ops}
    out = []
    for label in names:
        kind, _, name = label.partition(" ")
        if kind == "pin":
            fqn = next(u.fqn for u in graph.uses if u.stored == name)
            out.append(Fact(kind, str(wanted[name]._replace(name=fqn))))
        elif kind == "op":
            out.append(Fact(kind, place(ops[name])))
        elif kind in BOUNDARIES:
            module, side, slot = _boundary(name, graph)
            way = f"{'into' if side == 'in' else 'out of'} '{module}'"
            out.append(Fact(kind, BOUNDARIES[kind].format(f"{way} ({slot})" if slot else way)))
        elif kind != "unsummed" or not _is_split(name, graph, wanted):
            out.append(Fact(kind, WORDS.get(kind, label).format(name)))
    return out


def _is_split(fqn: str, graph: Graph, wanted: Mapping[str, Pin]) -> bool:
    """Whether a pin shards a parameter: then each rank has the gradient of its own part."""
    found = (wanted.get(u.stored) for u in graph.uses if u.fqn == fqn)
    return any(pin is not None and pin.dim is not None for pin in found)


def _boundary(name: str, graph: Graph) -> tuple[str, str, str]:
    for boundary in graph.boundaries:
        key = (boundary.module, boundary.side, boundary.slot)
        if name in (" ".join(key), str(graph.slot(boundary))):
            return key
    return ("", "", name)
