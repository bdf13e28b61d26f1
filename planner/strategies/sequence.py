"""Sequence parallelism: finds the sequence axes that may be sharded, and the tensors that must be.

The hidden states that blocks pass on are sharded along the sequence, and with them everything that
is computed from them alone: norms, residual sums. Ops that need every position (attention, the
loss) gather. For the rest of the planner these are axes like any others, opened here.

Sequence lengths vary at run time, so a trace with one length proves less about them. Sequence axes
stay unsharded in the root's own code, where the model's inputs enter and its outputs leave; where
code outside of the blocks takes an element or a slice (the trace of `x[:, -keep:]` with keep = 0 is
that of x itself); where a length makes new tensors (positions, masks); and where torch infers
another size beside it, which it cannot on a rank that has none of the tokens of a short sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardwright.errors import InfeasibleError
from shardwright.planner.contract.names import grouped, pattern
from shardwright.planner.graph.axes import ATOM, CONCAT, Axes, Dim, atoms_of, find
from shardwright.planner.graph.graph import Boundary, Graph

Shards = Iterable[tuple[int, int, int]]
"""(tensor dim, id of the axis, mask of sub-axes). A sequence is sharded over the full mesh dim."""

TAKES_A_PART = frozenset({"alias", "slice", "select", "index", "gather", "index_select"})


@dataclass(frozen=True)
class OpenSequence:
    """The axes along which sequences may be sharded.

    Attributes:
        axes: Id of the axis -> the first input with it, as redistributions name it: "input_ids.1".
        closed: (tensor, dim) where these axes stay unsharded.
        handed: Hidden states that must be sharded -> (dim, id of the axis).
        ends: Hidden states before the first block and after the last -> (dim, id of the axis).
            These may be sharded but need not be: code outside of the blocks may need all positions.
        local: Modules (norms) that take sharded hidden states. They work on each position alone;
            sharding reduces their work and what they save for the backward pass.
    """

    axes: Mapping[int, str]
    closed: frozenset[tuple[str, int]]
    handed: Mapping[str, tuple[int, int]]
    ends: Mapping[str, tuple[int, int]]
    local: frozenset[str]

    def splits(self, shards: Shards) -> bool:
        """Whether any of `shards` is along a sequence."""
        return any(a in self.axes for _, a, _ in shards)

    def misplaced(self, boundary: Boundary, source: Shards, target: Shards) -> bool:
        """Whether going from shards `source` to `target` at `boundary` makes a norm run unsharded.

        This is so if it gathers before a norm, or, in a block, shards behind one.
        """
        whole, split = (source, target) if boundary.side == "out" else (target, source)
        if boundary.module not in self.local or self.splits(whole) or not self.splits(split):
            return False
        return boundary.side == "in" or _in_block(boundary.module)

    def loose(self) -> OpenSequence:
        """Return the same axes with no hidden state that must be sharded."""
        return replace(self, handed={}, ends={**self.ends, **self.handed})

    def unfolded(self, tensors: Mapping[str, str], modules: Mapping[str, str]) -> OpenSequence:
        """Return the same for a graph whose tensors and modules are copies of this graph's."""
        closed = grouped(self.closed)
        return OpenSequence(
            self.axes,
            frozenset((copy, d) for copy, n in tensors.items() for d in closed.get(n, ())),
            {copy: self.handed[n] for copy, n in tensors.items() if n in self.handed},
            {copy: self.ends[n] for copy, n in tensors.items() if n in self.ends},
            frozenset(copy for copy, m in modules.items() if m in self.local),
        )

    def open(self, name: str, number: int, dim: Dim) -> frozenset[int]:
        """Return the sequence axes of dim `number` of tensor `name` that may be sharded."""
        if (name, number) in self.closed or _has_concat(dim):
            return frozenset()
        return frozenset(a.id for a in atoms_of(dim) if a.id in self.axes)


def open_sequence(graph: Graph, axes: Axes, size: int, must: bool = True) -> OpenSequence:
    """Open the sequence axes of the inputs of `graph`: the axes of length `size` in the trace.

    Raises:
        InfeasibleError: `must` is set, and no hidden state that blocks pass on has such an axis.
    """
    found: dict[int, str] = {}
    for name in graph.inputs:
        for i, dim in enumerate(axes.dims[name]):
            atom = find(dim)
            if atom.kind == ATOM and atom.size == size:
                found.setdefault(atom.id, f"{name}.{i}")
    inferred = {(n, i) for n, i in graph.marks.inferred if find(axes.dims[n][i]).id in found}
    inferred = inferred if must else set()  # cp has no steps of a single token
    closed = frozenset(_closed(graph, axes)) | inferred
    local = frozenset(_local(graph)) - _with_any(graph, {n for n, _ in inferred})
    between = _between(graph, local)
    handed: dict[str, tuple[int, int]] = {}
    ends: dict[str, tuple[int, int]] = {}
    for name in sorted(graph.marks.carried):
        places = [(i, find(d).id) for i, d in enumerate(axes.dims[name]) if find(d).id in found]
        if len(places) != 1:  # an attention bias has two; it is not a hidden state
            continue
        (handed if name in between else ends)[name] = places[0]
        for b in graph.boundaries:
            if b.source == name and b.side == "in" and b.module.rpartition(".")[2].isdigit():
                handed[b.target] = places[0]  # it enters a block
    if must and not handed:
        raise InfeasibleError(
            "sequence parallelism: this model has no stack of blocks that hand on a hidden state "
            f"with a sequence (inputs of length {size} in the trace): plan it without"
        )
    return OpenSequence(found, closed, handed, ends, local)


def _between(graph: Graph, local: Collection[str]) -> set[str]:
    """Return tensors that leave a block, unless code outside reads them other than in a norm."""
    made = {b.target for b in graph.boundaries if b.side == "out" and _in_block(b.module)}
    for op in graph.ops:
        if not _in_block(op.module) and op.module not in local:
            made -= {*op.inputs}
    return made


def _in_block(module: str) -> bool:
    return pattern(module) != module


def _local(graph: Graph) -> Iterator[str]:
    """Yield modules whose parameters, including those of submodules, are all vectors."""
    shapes = {u.fqn: graph.tensors[u.stored].shape for u in graph.uses if not u.is_buffer}
    owners = {name.rpartition(".")[0] for name in shapes}
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    for owner in owners - {""}:
        if not any(name.startswith(f"{owner}.") for name in matrices):
            yield owner


def _with_any(graph: Graph, names: set[str]) -> set[str]:
    """Return the modules whose own code has one of these tensors."""
    found = {b.module for b in graph.boundaries if b.side == "in" and b.target in names}
    return found | {op.module for op in graph.ops if names & {*op.inputs, *op.outputs}}


def _closed(graph: Graph, axes: Axes) -> Iterator[tuple[str, int]]:
    names = {*graph.inputs, *graph.outputs}
    names |= {u.stored for u in graph.uses} | {u.used for u in graph.uses}
    for op in graph.ops:
        if not op.module or (not _in_block(op.module) and op.call.op in TAKES_A_PART):
            names |= {*op.inputs, *op.outputs}
    for name in names:
        yield from ((name, i) for i in range(len(axes.dims[name])))
    yield from graph.marks.counted


def _has_concat(dim: Dim) -> bool:
    dim = find(dim)
    return dim.kind == CONCAT or any(_has_concat(c) for c in dim.children)
