"""The whole graph from the folded one: copies of the traced blocks, edges between them included."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from shardwright.planner.blocks.fold import Folding, Item, Segment, Unfoldable, place_of, timeline
from shardwright.planner.contract.names import is_within
from shardwright.planner.graph.graph import Block, Boundary, Graph, Op, Use
from shardwright.planner.graph.marks import Names


@dataclass
class Unfolded:
    """The whole graph, and which tensor or op of the folded one each of its own is a copy of."""

    graph: Graph
    origin: dict[str, str]


def unfold(folding: Folding, alike: int | None = None) -> Unfolded:
    """Copy the segments of the traced blocks for every block of the whole stacks.

    Runs that cost nothing are left out: in each block they do what they do in the traced one.

    Args:
        folding: The folded graph.
        alike: Of blocks in a row that are copies of one, at most so many; by default all. With 3,
            what is true of any three blocks in a row of the whole is true of three of these.

    Raises:
        Unfoldable: a block is read from afar.
    """
    if not folding.segments:
        graph = folding.graph
        return Unfolded(graph, {n: n for n in (*graph.tensors, *(op.name for op in graph.ops))})
    graph = folding.graph
    if graph.unpriced:  # in these blocks read no others from afar either
        _Unfolder(folding, graph, 3, graph.marks.collected).run()
    return _Unfolder(folding, graph.priced_runs(), alike).run()


class _Names(dict[str, str]):
    """Names in the folded graph -> names in the whole one, worked out when first asked for."""

    def __init__(self, known: Mapping[str, str], find: Callable[[str], str]) -> None:
        super().__init__(known)
        self.find = find

    def __missing__(self, name: str) -> str:
        found = self[name] = self.find(name)
        return found


class Columns:
    """Ops and boundaries, field by field."""

    def __init__(self, items: Sequence[Item]) -> None:
        ops = [item for item in items if isinstance(item, Op)]
        boundaries = [item for item in items if isinstance(item, Boundary)]
        self.ops: list[Any] = [*zip(*ops, strict=True)] or [()] * len(Op._fields)
        self.boundaries: list[Any] = [*zip(*boundaries, strict=True)] or [()] * len(
            Boundary._fields
        )


class _Copy:
    """Names as block number `block`, a copy of `segment`, has them; without one, as all else."""

    def __init__(self, naming: _Naming, segment: Segment | None, block: int) -> None:
        self.segment, self.at = segment, f"@{block}" if segment else ""
        kept = naming.folded.tensors
        own = {n: n + self.at for n in segment.keys if n in kept} if segment else {}
        self.tensors = _Names(own, lambda name: naming.tensor(name, segment, block))
        self.modules = _Names({}, lambda name: naming.module(name, segment, block))


class _Naming:
    """What stands for a name of the folded graph in a block of the whole one.

    Of what is `collected` from all blocks it gives one to those who read it.
    """

    def __init__(
        self, folding: Folding, folded: Graph, alike: int | None, collected: Collection[str]
    ) -> None:
        self.owner, self.folded, self.collected = folding.owner, folded, collected
        self.rows = {row[0].stack.path: row for row in folding.segments}
        self.places = {
            path: [p for _, run in groupby(row[0].stack.traced) for p in islice(run, alike)]
            for path, row in self.rows.items()
        }

    @staticmethod
    def module(module: str, segment: Segment | None, block: int) -> str:
        """Name of a module or parameter as it stands in block number `block`."""
        if segment is None or not is_within(module, segment.module):
            return module
        return f"{segment.stack.path}.{block}{module.removeprefix(segment.module)}"

    def tensor(self, tensor: str, segment: Segment | None, block: int) -> str:
        """The copy of `tensor` that block number `block` takes or makes."""
        owner = self.owner.get(tensor)
        if owner is None:
            return tensor
        stack, key = owner.stack, owner.keys[tensor]
        if owner is segment:
            return f"{tensor}@{block}"
        row, places = self.rows[stack.path], self.places[stack.path]
        if segment is not None and segment.stack is stack and owner.place == segment.place - 1:
            return f"{row[places[block - 1]].tensors[key]}@{block - 1}"
        if owner.sole:
            return f"{tensor}@{places.index(owner.place)}"
        if segment is None and tensor in self.collected:
            at = next(n for n, place in enumerate(places) if row[place].kind == owner.kind)
            return f"{row[places[at]].tensors[key]}@{at}"
        inside = segment is not None and segment.stack is stack
        if owner.last and not inside:
            return f"{row[places[-1]].tensors[key]}@{len(places) - 1}"
        raise Unfoldable(f"{owner.module} is read from afar")


class _Unfolder:
    """Writes the unfolded graph, of all runs of the folded one or of some."""

    def __init__(
        self,
        folding: Folding,
        graph: Graph,
        alike: int | None,
        collected: Collection[str] = (),
    ) -> None:
        naming = _Naming(folding, graph, alike, collected)
        self.folding, self.folded, self.rows = folding, graph, naming.rows
        self.out, self.origin = Graph(), dict[str, str]()
        self.outside = _Copy(naming, None, 0)
        self.blocks = {
            path: [_Copy(naming, row[p], block) for block, p in enumerate(naming.places[path])]
            for path, row in self.rows.items()
        }
        self.copies: dict[int, list[_Copy]] = {}
        for copy in (c for copies in self.blocks.values() for c in copies):
            self.copies.setdefault(id(copy.segment), []).append(copy)

    def run(self) -> Unfolded:
        """The whole graph."""
        g, out = self.folded, self.out
        self.add_tensors({n: n for n in g.tensors if n not in self.folding.owner})
        within = {id(i): s for row in self.folding.segments for s in row for i in s.items}
        done: dict[str, set[int]] = {}
        for item in timeline(g):
            segment = within.get(id(item))
            if segment is None:
                self.add_items(Columns([item]), self.outside)
            elif item.traced_call not in (calls := done.setdefault(segment.stack.path, set())):
                self.add_blocks(segment.stack.path, item.traced_call, not calls)
                calls.add(item.traced_call)
        for use in g.uses:
            for copy in self.copies_of(self.folding.owner.get(use.used)):
                stored, used = copy.tensors[use.stored], copy.tensors[use.used]
                out.uses.append(Use(copy.modules[use.fqn], stored, used, use.is_buffer))
        for module, slot, name in g.watched:
            for copy in self.copies_of(self.around(module)):
                out.watched.append((copy.modules[module], slot, copy.tensors[name]))
        out.marks = g.marks.copied(self.everywhere)
        for copies in (self.everywhere((n,)) for n in g.marks.names()):
            out.alike |= {copy: copies[0][0] for (copy,) in copies[1:]}
        out.pinned, out.unpriced = g.pinned, g.unpriced
        out.inputs = list(g.inputs)
        out.outputs = [copy for n in g.outputs for (copy,) in self.everywhere((n,))]
        return Unfolded(out, self.origin)

    def add_blocks(self, path: str, traced_call: int, first: bool) -> None:
        """Add the copies of all blocks of a stack as they ran in a traced call, maybe the first."""
        columns = [
            Columns([i for i in s.items if i.traced_call == traced_call]) for s in self.rows[path]
        ]
        for copy in self.blocks[path]:
            assert copy.segment is not None
            if first:
                self.add_tensors(copy.tensors)  # its own: those of others are not known yet
            start = len(self.out.ops)
            self.add_items(columns[copy.segment.place], copy)
            tensors, kind = tuple(copy.tensors.values()), hash((id(copy.segment), traced_call))
            self.out.blocks.append(Block(kind, tensors, start, len(self.out.ops)))

    def add_tensors(self, names: Mapping[str, str]) -> None:
        """Add copies of tensors, by the names of these."""
        found = map(self.folded.tensors.__getitem__, names)
        self.out.tensors.update(zip(names.values(), found, strict=True))
        self.origin.update(zip(names.values(), names, strict=True))

    def add_items(self, items: Columns, copy: _Copy) -> None:
        """Add the copies of ops and boundaries."""
        out, name, module = self.out, copy.tensors.__getitem__, copy.modules.__getitem__
        names, calls, inputs, outputs, modules, sources, literals, numbers = items.ops
        made = [n + copy.at for n in names]
        taken = [tuple(map(name, each)) for each in inputs]
        given = [tuple(map(name, each)) for each in outputs]
        placed = map(module, modules)
        out.ops += map(Op, made, calls, taken, given, placed, sources, literals, numbers)
        self.origin.update(zip(made, names, strict=True))
        modules, sides, slots, sources, targets, flags, numbers = items.boundaries
        ends = map(name, sources), map(name, targets)
        out.boundaries += map(Boundary, map(module, modules), sides, slots, *ends, flags, numbers)

    def everywhere(self, names: Names) -> list[Names]:
        """Tensors of the folded graph as all copies of the block that makes the last have them."""
        copies = self.copies_of(self.folding.owner.get(names[-1]))
        return [tuple(copy.tensors[n] for n in names) for copy in copies]

    def copies_of(self, segment: Segment | None) -> list[_Copy]:
        """The blocks that are copies of `segment`, or what is outside of all."""
        return [self.outside] if segment is None else self.copies.get(id(segment), [])

    def around(self, module: str) -> Segment | None:
        """The traced block that `module` is in."""
        for row in self.folding.segments:
            place = place_of(row[0].stack, module)
            if place is not None:
                return row[place]
        return None
