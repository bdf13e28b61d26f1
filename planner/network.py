"""Turn a refined graph into a problem: a variable a tensor, a factor an op, a border or a use.

Tensors change their placement only at borders of modules, where the runtime can act, and between a
parameter as it is stored and as its module sees it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass
from itertools import product

from shardwright.planner.cost import Costs, Toll
from shardwright.planner.graph import Graph
from shardwright.planner.plan_file import pattern
from shardwright.planner.problem import Problem, Row
from shardwright.planner.states import PARTIAL, WHOLE, State, States

COMPONENTS = ("bytes", "time", "backward", "actions", "tie")
"""Bytes stored, nanoseconds of all passes, and of a backward pass where none is asked for, changes
of placement (the fewest that do), and a number made of names, so that plans come out the same every
time."""
BYTES, TIME, BACKWARD, ACTIONS, TIE = range(5)


@dataclass
class Network:
    """The problem and the variable of each tensor."""

    problem: Problem
    variables: dict[str, int]
    states: States

    def assignment(self, values: tuple[int, ...]) -> dict[str, State]:
        """Tensor name -> state."""
        return {name: self.states.domain(name)[values[v]] for name, v in self.variables.items()}


def build_network(
    graph: Graph, states: States, costs: Costs, rigid: frozenset[str] = frozenset()
) -> Network:
    """The problem of choosing a state for every tensor of `graph`.

    Args:
        graph: The traced model.
        states: Domains and modes.
        costs: Prices.
        rigid: Modules at whose borders nothing may change.
    """
    problem = Problem(COMPONENTS)
    variables = {name: problem.variable(name, len(states.domain(name))) for name in graph.tensors}
    index = {name: {s: i for i, s in enumerate(states.domain(name))} for name in graph.tensors}

    def unary(name: str, label: str, price: dict[State, tuple[int, ...]]) -> None:
        rows = [Row((index[name][s],), c) for s, c in price.items() if s in index[name]]
        problem.factor(f"{label} {name}", [variables[name]], rows)

    for name, label in tie_names(graph).items():
        ties = {
            s: (0, 0, 0, 0, zlib.crc32(f"{label} {i}".encode()) % 4096)
            for s, i in index[name].items()
        }
        unary(name, "tie", ties)
    for name in dict.fromkeys(graph.outputs):
        unary(name, "output", {WHOLE: (0,) * 5})
    for name, allowed in states.handed().items():
        must = states.sequence is not None and name in states.sequence.handed
        unary(name, "handed" if must else "carried", {s: (0,) * 5 for s in allowed})
    for name in sorted(graph.logits):
        unary(name, "logits", {s: (0,) * 5 for s in states.domain(name) if s != PARTIAL})
    for name in dict.fromkeys(u.stored for u in graph.uses):
        unary(name, "store", {s: (costs.bytes(name, s), 0, 0, 0, 0) for s in states.domain(name)})
    for op in graph.ops:
        names = (*op.inputs, *op.outputs)
        rows = [
            Row(
                tuple(index[n][s] for n, s in zip(names, mode.states, strict=True)),
                (0, costs.compute(op, mode), 0, 0, 0),
            )
            for mode in states.modes(op)
        ]
        problem.factor(f"op {op.name}", [variables[n] for n in names], rows)

    def paid(toll: Toll, action: int) -> tuple[int, ...]:
        return (0, toll.time, toll.backward, action, 0)

    for use in graph.uses:
        rows = []
        for s, i in index[use.stored].items():
            for t, j in index[use.used].items():
                crossing, toll = costs.crossing(use.stored, s, t), costs.toll(use.stored, s, s, t)
                if crossing and toll and not crossing.forward:  # weights stay where they are
                    rows.append(Row((i, j), paid(toll, s != t)))
        scope = [variables[use.stored], variables[use.used]]
        problem.factor(f"use {use.fqn}", scope, rows)
    outer = graph.outer()
    first: dict[tuple[str, str, str], tuple[str, str]] = {}
    for border in graph.borders:
        # Where several would do, the module that makes a tensor, not a dropout behind it.
        action = 4 if not border.has_parameters else 2 if border.side == "out" else 3
        around = outer.get(border.target)
        names = (*([around.source] if around else []), border.source, border.target)
        rows = []
        for chosen in product(*(index[n].items() for n in names)):
            (s, _), (t, _) = chosen[-2:]
            before = chosen[0][0] if around else s
            toll = costs.toll(border.source, before, s, t)
            if states.sequence and states.sequence.misplaced(border, s.shards, t.shards):
                continue
            if toll is not None and not (border.module in rigid and s != t):
                rows.append(Row(tuple(i for _, i in chosen), paid(toll, action * (s != t))))
        label = f"border {border.module} {border.side} {border.slot}"
        problem.factor(label, [variables[n] for n in names], rows)
        key = (border.module, border.side, border.slot)
        ends = first.setdefault(key, (border.source, border.target))
        if ends != (border.source, border.target):  # called again: the same change each time
            for a, b in zip(ends, (border.source, border.target), strict=True):
                same = [
                    Row((i, index[b][s]), (0,) * 5) for s, i in index[a].items() if s in index[b]
                ]
                problem.factor(f"again {key}", [variables[a], variables[b]], same)
    return Network(problem, variables, states)


def tie_names(graph: Graph) -> dict[str, str]:
    """Tensor name -> where it stands in its module, the same in each of several like blocks.

    So blocks that may as well be split in several ways are all split in the same.
    """
    places = {u.stored: (u.fqn, "stored") for u in graph.uses}
    places |= {u.used: (u.fqn, "used") for u in graph.uses}
    places |= {out: (op.module, "") for op in graph.ops for out in op.outputs}
    places |= {b.target: (b.module, f"{b.side} {b.slot}") for b in graph.borders}
    seen: Counter[tuple[str, str]] = Counter()
    out = {}
    for name in graph.tensors:
        module, where = places.get(name, ("", ""))
        seen[module, where] += 1
        out[name] = f"{pattern(module)} {where} {seen[module, where]}"
    return out
