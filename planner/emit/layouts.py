"""`Layouts`: the placements of tensors under an assignment of states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from shardwright.planner.contract import dims as layout
from shardwright.planner.contract.dims import simplify
from shardwright.planner.contract.names import made_once
from shardwright.planner.contract.placement import Placement
from shardwright.planner.graph.axes import ATOM, PRODUCT, Dim, find, leaves_of
from shardwright.planner.graph.graph import Graph
from shardwright.planner.strategies.state import Cut, State, cut_of, mask_at
from shardwright.planner.strategies.states import States
from shardwright.planner.verify.check import Assignment


class Layouts:
    """Layouts of the tensors of a graph under an assignment."""

    def __init__(self, graph: Graph, states: States, assignment: Assignment) -> None:
        self.graph, self.states, self.assignment = graph, states, assignment
        given = ((n, k, d) for n in graph.inputs for k, d in enumerate(states.axes.dims[n]))
        dims = [find(d) for n, k, d in given if (n, k) not in graph.marks.sized]
        self.run_time = {d.id for d in dims} | {a.id for d in dims for a in leaves_of(d)}
        # Not of buffers: how many rows of a table of positions are used depends on the inputs.
        weights = (u.stored for u in graph.uses if not u.is_buffer)
        self.known = {a.id for w in weights for d in states.axes.dims[w] for a in leaves_of(d)}
        # Code that computes with the experts of a rank may have their number as a dim, too.
        spread = (n for n, _ in graph.marks.spread_experts if (n, 0) in graph.marks.fixed)
        self.known -= {a.id for n in spread for a in leaves_of(states.axes.dims[n][0])}
        self._dims: dict[tuple[int, Cut, bool], layout.Dim] = {}
        self._placements: dict[tuple[int, State, bool, bool], Placement] = {}
        self.spread = dict(graph.marks.spread_experts)
        """Parameters whose experts are spread over ranks, and views of them -> how many experts
        have rows, and all."""

    def traced(self, name: str, state: State | None = None) -> tuple[layout.Dim, ...]:
        """Return the dims of a tensor with the sizes of the trace."""
        state = self.assignment[name] if state is None else state
        dims = [
            self._dim(d, cut_of(state.shards, k), False)
            for k, d in enumerate(self.states.axes.dims[name])
        ]
        return self._spread(name, dims)

    @cached_property
    def traced_dims(self) -> dict[str, tuple[layout.Dim, ...]]:
        """The dims of every tensor of the graph with the sizes of the trace."""
        return {name: self.traced(name) for name in self.graph.tensors}

    def placement(self, name: str, state: State | None = None, stored: bool = False) -> Placement:
        """Return the placement of a tensor. Run-time sizes are left open unless it is `stored`."""
        state = self.assignment[name] if state is None else state
        # copies of a block share their dims
        at = id(self.states.axes.dims[name]), state, stored, name in self.spread
        return made_once(self._placements, at, lambda: self._placed(name, state, stored))

    def _placed(self, name: str, state: State, stored: bool) -> Placement:
        dims = []
        for k, dim in enumerate(self.states.axes.dims[name]):
            cut = cut_of(state.shards, k)
            known = stored or bool(cut) or all(a.id in self.known for a in leaves_of(dim))
            dims.append(simplify(self._dim(dim, cut, not stored)) if known else layout.Atom(None))
        return Placement(
            self._spread(name, dims),
            self.states.sub.texts(state.partial),
            self.states.sub.texts(state.grad_partial),
        )

    def _spread(self, name: str, dims: Sequence[layout.Dim]) -> tuple[layout.Dim, ...]:
        """Return the dims of a tensor; that of the experts is sharded if they are spread."""
        if (experts := self.spread.get(name)) is None:
            return tuple(dims)
        of_ranks = layout.experts_of_ranks(*experts[:2], self.states.sub.ep)
        count = experts[0]
        first = dims[0].factors if isinstance(dims[0], layout.Product) else (dims[0],)
        size = layout.dim_size(first[0])
        assert size is not None and not size % count and not layout.is_split(first[0])
        each = () if size == count else (layout.Atom(size // count),)
        factors = (of_ranks, *each, *first[1:])
        return (layout.Product(factors) if len(factors) > 1 else factors[0], *dims[1:])

    def along(self, name: str, state: State) -> Placement:
        """Return the part of a tensor's placement that is over cp, with all sizes left open."""
        sub = self.states.sub
        cuts = [cut_of(state.shards, k) for k in range(len(self.states.axes.dims[name]))]
        split = [any(m == sub.along for _, m in cut) for cut in cuts]
        return Placement(
            tuple(layout.Atom(None, sub.text(sub.along) if cut else None) for cut in split),
            sub.texts(state.partial & sub.along),
            sub.texts(state.grad_partial & sub.along),
        )

    def dim(self, name: str, k: int) -> layout.Dim:
        """Return one dim of a tensor, with run-time sizes left open."""
        state, dim = self.assignment[name], self.states.axes.dims[name][k]
        return self._dim(dim, cut_of(state.shards, k), True)

    def length(self, *states: State) -> str | None:
        """Return the name of the sequence axis that any of `states` shards; None if none does."""
        opened = self.states.sequence.axes if self.states.sequence else {}
        names = {opened[a] for state in states for _, a, _ in state.shards if a in opened}
        return min(names, default=None)

    def _dim(self, dim: Dim, cut: Cut, open_sizes: bool) -> layout.Dim:
        dim = find(dim)
        at = (dim.id, cut, open_sizes)  # tensors share their dims
        return made_once(self._dims, at, lambda: self._made(dim, cut, open_sizes))

    def _made(self, dim: Dim, cut: Cut, open_sizes: bool) -> layout.Dim:
        mask, sub = mask_at(cut, dim.id), self.states.sub
        mesh = sub.text(mask) if mask else None
        if open_sizes and dim.id in self.run_time:
            return layout.Atom(None, mesh)
        if dim.kind == ATOM:
            shares = () if dim.id in self.run_time else sub.shares(dim.size, mask)
            return layout.Atom(dim.size, mesh, shares)
        children = tuple(self._dim(c, cut, open_sizes) for c in dim.children)
        return layout.Product(children) if dim.kind == PRODUCT else layout.Concat(children)
