"""Splits a run of the model into a chain of elements: computations of modules, and redistributions.

Ops that depend on no parameter (masks, positions) are aside. An op that reads only one element
joins it, except for products of several tensors (attention) and for ops of another module with
parameters of its own. Other consecutive ops of one module form one element. So edges always lead
forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.planner.contract.names import grouped, prefixes
from shardwright.planner.emit.model_blocks import ModelBlocks
from shardwright.planner.graph.graph import Boundary, Graph, Op, crossed
from shardwright.planner.graph.kv_cache import ATTENTION
from shardwright.planner.graph.views import is_move
from shardwright.planner.strategies.state import made_partial
from shardwright.planner.verify.recost import Bill

WEIGHT = -1
"""Stands for a parameter, or a tensor made from one alone, instead of the number of an element."""


@dataclass(eq=False)
class Element:
    """Consecutive ops of one module, or a redistribution at a module's boundary.

    Attributes:
        chain: The model and the blocks that contain the element.
        module: The module that computes it, or has the boundary.
        boundary: The boundary of a redistribution.
        ops: The ops of the element.
        reads: (number of an element, or None for an input of the model, the tensor as it is read,
            the boundaries that it crossed).
    """

    chain: tuple[str, ...]
    module: str
    boundary: Boundary | None = None
    ops: list[Op] = field(default_factory=list)
    reads: list[tuple[int | None, str, tuple[Boundary, ...]]] = field(default_factory=list)


class Elements:
    """The elements of a run, in order.

    Args:
        bill: The bill of the run.

    Attributes:
        found: The elements.
        aside: (enclosing blocks, op) of the ops that belong to no element.
        readers: Parameter as it is used -> number of the element that reads it first.
    """

    def __init__(self, bill: Bill) -> None:
        self.graph: Graph = bill.costs.graph
        self.state, self.rules = bill.assignment, bill.costs.axes.rules
        weights = [u for u in self.graph.uses if not u.is_buffer]
        self.blocks = ModelBlocks(u.fqn.rpartition(".")[0] for u in weights)
        self.entered = {b.target: b for b in self.graph.boundaries}
        self.outer = self.graph.outer()
        self.made: dict[str, int] = {u.used: WEIGHT for u in weights}
        self.weights = {u.used: u.used for u in self.graph.uses}
        self.inputs = frozenset(self.graph.inputs)
        self.found: list[Element] = []
        self.aside: list[tuple[tuple[str, ...], Op]] = []
        self.readers: dict[str, int] = {}
        self.entries = self._entries()
        self._ran: set[str] = set()
        for op in self.graph.ops:
            self._add(op)
        for name in self.graph.outputs:
            self.origin(name)

    def _entries(self) -> dict[str, list[str]]:
        """Return module -> the tensors that are redistributed as they enter it and are read."""
        read = {n for op in self.graph.ops for n in op.inputs} | {*self.graph.outputs}
        read |= {b.source for b in self.graph.boundaries}
        return grouped(
            (b.module, b.target)
            for b in self.graph.boundaries
            if b.side == "in" and b.target in read and self.state[b.source] != self.state[b.target]
        )

    def _enter(self, module: str) -> None:
        """Add the redistributions at a module's entry, before its first op."""
        if module in self._ran:
            return
        self._ran.add(module)
        for around in prefixes(module):
            for name in self.entries.pop(around, ()):
                self.origin(name)

    def _add(self, op: Op) -> None:
        self._enter(op.module)
        made = self.made
        inputs = [(n, made[n] if n in made else self.origin(n)) for n in dict.fromkeys(op.inputs)]
        read = [(n, o) for n, o in inputs if o is not None]
        chain = self.blocks.around(op.module)
        if not read:
            self.aside.append((chain, op))
            return
        if len(inputs) == 1 and read[0][1] == WEIGHT:
            made.update(dict.fromkeys(op.outputs, WEIGHT))
            base = self._path(op.inputs[0])[0]
            self.weights |= dict.fromkeys(op.outputs, self.weights.get(base, base))
            self.aside.append((chain, op))
            return
        sources = {o for _, o in read}
        product = len(read) > 1 and self._is_product(op, read)
        number = None if product else self._joined(op, chain, sources)
        if number is None:
            number = self._next(chain, self.blocks.part(op.module))
        element = self.found[number]
        element.ops.append(op)
        for name in op.inputs:
            base, path = (name, ()) if name in made else self._path(name)
            self.readers.setdefault(self.weights.get(base, base), number)
            at = made.get(base)
            if (at is not None and at not in (WEIGHT, number)) or base in self.inputs:
                element.reads.append((at, name, path))
        for name in op.outputs:
            made[name] = number

    def _joined(self, op: Op, chain: tuple[str, ...], sources: set[int]) -> int | None:
        """Return the element that an op joins because it reads only that; else None."""
        (number, *others) = sources
        if others or number == WEIGHT or self.found[number].chain != chain:
            return None
        element, part = self.found[number], self.blocks.part(op.module)
        own = part in self.blocks.owners and part != element.module
        fits = is_move(op.call) or not (own or element.boundary)
        return number if fits else None

    def _is_product(self, op: Op, read: list[tuple[str, int]]) -> bool:
        rule = self.rules.get(op.name)
        several = sum(o != WEIGHT for _, o in read) > 1
        return several and rule is not None and bool(rule.sum or op.call.op in ATTENTION)

    def _next(self, chain: tuple[str, ...], part: str) -> int:
        """Return the last element if it belongs to this part of the model, else a new one."""
        last = self.found[-1] if self.found else None
        if last is None or last.boundary or (last.chain, last.module) != (chain, part):
            self.found.append(Element(chain, part))
        return len(self.found) - 1

    def origin(self, name: str) -> int | None:
        """Return the number of the element that makes a tensor; None if no element does.

        Redistributions on the way become elements.
        """
        if name in self.made:
            return self.made[name]
        boundary = self.entered.get(name)
        if boundary is None:
            return None
        around = self.outer.get(boundary.target)
        ends = crossed(boundary, around)
        first, source, target = self.state[ends[0]], self.state[ends[-2]], self.state[ends[-1]]
        taken = ends[0] if around and made_partial(first, source) and target != source else ends[-2]
        number = self.origin(taken)
        if number is not None and number != WEIGHT and source != target:
            base, path = self._path(taken)
            chain = self.blocks.around(boundary.module)
            self.found.append(Element(chain, boundary.module, boundary))
            self.found[-1].reads.append((self.made[base], taken, path))
            number = self.made[name] = len(self.found) - 1
        return number

    def _path(self, name: str) -> tuple[str, tuple[Boundary, ...]]:
        """Return the tensor that an element made, and the boundaries that it crossed since."""
        path: list[Boundary] = []
        while name not in self.made and name in self.entered:
            path.append(self.entered[name])
            name = path[-1].source
        return name, tuple(path)
