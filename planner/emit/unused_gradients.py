"""Placements of gradients of module outputs that the model does not use, but hooks may ask for.

The graph has no such gradient, so the solver does not place it. But the op that makes the tensor
passes its gradient on to the op's inputs, whose gradients have a placement: replicated or Partial.
If all of these agree, and the op works alike on each rank, this gradient has the same placement.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

from shardwright.planner.contract.placement import Placement
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.graph import Boundary, Op
from shardwright.planner.strategies.state import mask_of

UNKNOWN = -1
"""Stands for a mask that is not known."""


class UnusedGradients:
    """Finds placements of gradients that the model does not compute, given the tensors' states."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts, graph = layouts, layouts.graph
        self.tensors, self.assignment = graph.tensors, layouts.assignment
        self.makers: dict[str, Op | Boundary] = dict(graph.producers())
        self.makers |= {b.target: b for b in graph.crossed if b.target != b.source}
        marks = graph.marks
        self.beyond = marks.own_gradients | marks.linear_gradients | marks.in_regions
        """Tensors whose gradients need more than a placement."""
        self._found: dict[str, frozenset[int]] = {}

    def placement(self, name: str) -> Placement:
        """Return the placement of a tensor, with that of its gradient if it is known."""
        state, mask = self.assignment[name], self.mask(name)
        known = mask in (None, UNKNOWN, 0)
        state = state if known else state._replace(grad_partial=state.grad_partial | (mask or 0))
        return self.layouts.placement(name, state)

    def mask(self, name: str) -> int | None:
        """Return the sub-axes over which a tensor's gradient is Partial.

        The result is `UNKNOWN` if that is not known, None if the tensor can have no gradient.
        """
        found = self._masks(name)
        return next(iter(found), None) if len(found) < 2 else UNKNOWN

    def _masks(self, name: str) -> frozenset[int]:
        """Return the masks that follow from the tensors that this one was made from.

        It is iterative, innermost tensors first: chains may be longer than Python's stack allows.
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
            return frozenset({UNKNOWN})  # only a part of its elements is sharded
        if isinstance(maker, Op):
            return frozenset(m for n in maker.inputs for m in self._through(maker, name, n))
        return frozenset() if maker is None else self._across(maker)

    def _across(self, boundary: Boundary) -> frozenset[int]:
        """Return the masks behind a boundary. Its redistribution is known for full gradients."""
        found, name = self._found[boundary.source], boundary.source
        if self.assignment[name] == self.assignment[boundary.target]:
            return found
        if self.tensors[name].differentiable:
            return frozenset({0})
        return frozenset(m if m == 0 else UNKNOWN for m in found)

    def _through(self, op: Op, result: str, operand: str) -> frozenset[int]:
        """Return the masks that an `operand` implies for the gradient of a `result` of an op.

        Over sub-axes that shard nothing of the op, each rank computes the full op, and the gradient
        is passed on as it is. Over the others the result must be sharded: each rank has the
        gradient of its part, and computes from it that of its part of the operand, or a term.
        """
        states = [self.assignment[n] for n in (*op.inputs, *op.outputs)]
        split = reduce(or_, (mask_of(state.shards) | state.partial for state in states), 0)
        if split & ~self._covered(result):
            return frozenset({UNKNOWN} if self._found[operand] else ())
        parts = self._covered(operand) & split
        return frozenset(
            UNKNOWN if m == UNKNOWN or split & ~parts & ~m else m & ~split
            for m in self._found[operand]
        )

    def _covered(self, name: str) -> int:
        return self.layouts.states.covered(name, self.assignment[name].shards)
