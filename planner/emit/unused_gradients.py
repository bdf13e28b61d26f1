"""Gradients of module outputs that nothing in the model uses: hooks may ask for them.

The graph has no such gradient, so the solver decides nothing about it. But code that makes the
tensor of others passes its gradient on to theirs, and theirs are decided: each rank has all of it,
or a partial term. Where all of them agree, and the code works alike on each rank, that is the
answer for this gradient, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.planner.contract.placement import Placement
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.graph import Boundary, Op
from shardwright.planner.strategies.state import mask_of

UNKNOWN = -1
"""In place of a mask."""


class UnusedGradients:
    """What is known of gradients that the model does not have, under an assignment of states."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts, graph = layouts, layouts.graph
        self.tensors, self.assignment = graph.tensors, layouts.assignment
        self.makers: dict[str, Op | Boundary] = dict(graph.producers())
        self.makers |= {b.target: b for b in graph.crossed if b.target != b.source}
        marks = graph.marks
        self.beyond = marks.own_gradients | marks.linear_gradients | marks.in_regions
        """Tensors of whose gradients more must be known than the placement."""
        self._found: dict[str, frozenset[int]] = {}

    def placement(self, name: str) -> Placement:
        """The placement of a tensor, with that of its gradient where it follows."""
        state, mask = self.assignment[name], self.mask(name)
        known = mask in (None, UNKNOWN, 0)
        state = state if known else state._replace(grad_partial=state.grad_partial | (mask or 0))
        return self.layouts.placement(name, state)

    def mask(self, name: str) -> int | None:
        """Over which sub-axes each rank should have a term of a tensor's gradient.

        `UNKNOWN` where nobody can tell; None where it has none, whoever asks.
        """
        found = self._masks(name)
        return next(iter(found), None) if len(found) < 2 else UNKNOWN

    def _masks(self, name: str) -> frozenset[int]:
        """What the tensors that this one was made of ask for; nothing of those without gradients.

        The innermost first: code may be deeper than Python's stack.
        """
        waiting = [name]
        while waiting:
            last = waiting[-1]
            missing = [n for n in self._made_of(last) if n not in self._found]
            if not missing:
                self._found[last] = self._own(last)
                waiting.pop()
            waiting += missing
        return self._found[name]

    def _made_of(self, name: str) -> Iterable[str]:
        maker = self.makers.get(name)
        if maker is None or self._decided(name):
            return ()
        return maker.inputs if isinstance(maker, Op) else (maker.source,)

    def _decided(self, name: str) -> bool:
        tensor = self.tensors[name]
        real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        return tensor.differentiable or not real or name in self.beyond

    def _own(self, name: str) -> frozenset[int]:
        if name in self.beyond:
            return frozenset({UNKNOWN})
        if self._decided(name):
            pending = self.assignment[name].grad_partial
            return frozenset({pending} if self.tensors[name].differentiable else ())
        maker, state = self.makers.get(name), self.assignment[name]
        if mask_of(state.shards) & ~self._covered(name):
            return frozenset({UNKNOWN})  # some of its rows are split, and some are not
        if isinstance(maker, Op):
            return frozenset(m for n in maker.inputs for m in self._through(maker, name, n))
        return frozenset() if maker is None else self._across(maker)

    def _across(self, boundary: Boundary) -> frozenset[int]:
        """Behind a boundary: what changes there does so for a gradient that is whole."""
        found, name = self._found[boundary.source], boundary.source
        if self.assignment[name] == self.assignment[boundary.target]:
            return found
        if self.tensors[name].differentiable:
            return frozenset({0})
        return frozenset(m if m == 0 else UNKNOWN for m in found)

    def _through(self, op: Op, result: str, operand: str) -> frozenset[int]:
        """What an `operand` asks of the gradient of a `result` of an op.

        Over sub-axes that split nothing of the op, each rank does all of it: the gradient of what
        it makes is handed on as it is. Over the others the result is to be split, each rank has
        the gradient of its part, and makes of it that of its part, or a term.
        """
        states = [self.assignment[n] for n in (*op.inputs, *op.outputs)]
        split = 0
        for state in states:
            split |= mask_of(state.shards) | state.partial
        if split & ~self._covered(result):
            return frozenset({UNKNOWN} if self._found[operand] else ())
        parts = self._covered(operand) & split
        return frozenset(
            UNKNOWN if m == UNKNOWN or split & ~parts & ~m else m & ~split
            for m in self._found[operand]
        )

    def _covered(self, name: str) -> int:
        return self.layouts.states.covered(name, self.assignment[name].shards)
