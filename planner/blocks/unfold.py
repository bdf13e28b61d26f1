"""Unfold a folded graph: copy the traced blocks, and the edges between them, to all blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from shardwright.planner.blocks.fold import Folding, ReadFromAfar, Segment, place_of
from shardwright.planner.blocks.stacks import condensed
from shardwright.planner.contract.names import grouped, is_within
from shardwright.planner.graph.graph import Block, Boundary, Graph, Item, Op, Use, made_by
from shardwright.planner.graph.marks import Names


@dataclass
class Unfolded:
    """An unfolded graph.

    Attributes:
        graph: The graph.
        origin: Its tensors and ops -> those of the folded graph.
        blocks: Path of a stack -> for each copy in the graph, the numbers of the blocks of the full
            stack that it represents.
        folding: The folded graph.
    """

    graph: Graph
    origin: dict[str, str]
    blocks: dict[str, list[list[int]]]
    folding: Folding

    @cached_property
    def short(self) -> Unfolded:
        """A graph with at most three copies of a block in a row."""
        return unfold(self.folding, alike=3)


def unfold(folding: Folding, alike: int | None = None) -> Unfolded:
    """Copy the segments of the traced blocks for every block of the full stacks.

    Unpriced runs are left out: in each block they do what they do in the traced block.

    Args:
        folding: The folded graph.
        alike: How often in a row the same blocks may come; by default as often as they do. With 3,
            any three consecutive blocks of the full stack have a counterpart in the result.

    Raises:
        Unfoldable: code away from a block reads its tensors.
    """
    if not folding.segments:
        graph = folding.graph
        names = (*graph.tensors, *(op.name for op in graph.ops))
        return Unfolded(graph, {n: n for n in names}, {}, folding)
    return _Unfolder(folding, folding.graph.priced_runs(), alike).run()


def check_unpriced(folding: Folding) -> None:
    """Check that unpriced runs do not read blocks from afar either.

    Raises:
        Unfoldable: they do.
    """
    if folding.segments and folding.graph.unpriced:
        _Unfolder(folding, folding.graph, 3, folding.graph.marks.collected).run()


class _Names(dict[str, str]):
    """Names in the folded graph -> names in the unfolded graph, computed on first access."""

    def __init__(self, known: Mapping[str, str], find: Callable[[str], str]) -> None:
        super().__init__(known)
        self.find = find

    def __missing__(self, name: str) -> str:
        found = self[name] = self.find(name)
        return found


class Columns:
    """Ops and boundaries as one column per field."""

    def __init__(self, items: Sequence[Item]) -> None:
        ops = [item for item in items if isinstance(item, Op)]
        boundaries = [item for item in items if isinstance(item, Boundary)]
        self.ops: list[Any] = [*zip(*ops, strict=True)] or [()] * len(Op._fields)
        self.boundaries: list[Any] = [*zip(*boundaries, strict=True)] or [()] * len(
            Boundary._fields
        )


class _Copy:
    """Names of tensors and modules in block number `block`, a copy of `segment`.

    Without a segment: the names outside of all blocks.
    """

    def __init__(self, naming: _Naming, segment: Segment | None, block: int) -> None:
        self.segment, self.at = segment, f"@{block}" if segment else ""
        kept = naming.folded.tensors
        own = {n: n + self.at for n in segment.keys if n in kept} if segment else {}
        self.tensors = _Names(own, lambda name: naming.tensor(name, segment, block))
        self.modules = _Names({}, lambda name: naming.module(name, segment, block))


class _Naming:
    """Translates names of the folded graph to names in a block of the unfolded graph.

    A reader outside of the blocks that reads a `collected` tensor gets the copy of one block.
    """

    def __init__(
        self, folding: Folding, folded: Graph, alike: int | None, collected: Collection[str]
    ) -> None:
        self.owner, self.folded, self.collected = folding.owner, folded, collected
        self.rows = {row[0].stack.path: row for row in folding.segments}
        copies = {p: condensed(row[0].stack.traced, alike) for p, row in self.rows.items()}
        self.places = {path: [place for place, _ in row] for path, row in copies.items()}
        self.blocks = {path: [blocks for _, blocks in row] for path, row in copies.items()}

    @staticmethod
    def module(module: str, segment: Segment | None, block: int) -> str:
        """Return the name of a module or parameter in block number `block`."""
        if segment is None or not is_within(module, segment.module):
            return module
        return f"{segment.stack.path}.{block}{module.removeprefix(segment.module)}"

    def tensor(self, tensor: str, segment: Segment | None, block: int) -> str:
        """Return the copy of `tensor` that block number `block` takes or produces.

        Raises:
            ReadFromAfar: the tensor belongs to a block that is read from afar.
        """
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
        raise ReadFromAfar(f"{owner.module} is read from afar", [stack.path])


class _Unfolder:
    """Writes the unfolded graph of `graph`: the folded graph, or only some of its runs."""

    def __init__(
        self, folding: Folding, graph: Graph, alike: int | None, collected: Collection[str] = ()
    ) -> None:
        self.naming = naming = _Naming(folding, graph, alike, collected)
        self.folding, self.folded, self.rows = folding, graph, naming.rows
        self.out, self.origin = Graph(), dict[str, str]()
        self.outside = _Copy(naming, None, 0)
        self.blocks = {
            path: [_Copy(naming, row[p], block) for block, p in enumerate(naming.places[path])]
            for path, row in self.rows.items()
        }
        every = (copy for copies in self.blocks.values() for copy in copies)
        self.copies = grouped((id(copy.segment), copy) for copy in every)

    def run(self) -> Unfolded:
        """Return the unfolded graph."""
        g, out = self.folded, self.out
        self.add_tensors({n: n for n in g.tensors if n not in self.folding.owner})
        within = {id(i): s for row in self.folding.segments for s in row for i in s.items}
        done: dict[str, set[int]] = {}
        for item in g.timeline():
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
        self.add_watched()
        # What lengths decide may be of another block, and is marked in the folded graph.
        consumed = {"beside_lost": set(), "beside_tests": set(), "cut_by": set()}
        out.marks = replace(g.marks, **consumed).copied(self.everywhere)
        for copies in (self.everywhere((n,)) for n in g.marks.names()):
            out.alike |= {copy: copies[0][0] for (copy,) in copies[1:]}
        out.pinned, out.unpriced, out.lengths = g.pinned, g.unpriced, g.lengths
        out.inputs = list(g.inputs)
        out.outputs = [copy for n in g.outputs for (copy,) in self.everywhere((n,))]
        return Unfolded(out, self.origin, self.naming.blocks, self.folding)

    def add_blocks(self, path: str, traced_call: int, first: bool) -> None:
        """Add the copies of all blocks of a stack in one traced call.

        `first` says whether it is the first call, in which the tensors are added too.
        """
        columns = [
            Columns([i for i in s.items if i.traced_call == traced_call]) for s in self.rows[path]
        ]
        for copy in self.blocks[path]:
            assert copy.segment is not None
            if first:
                self.add_tensors(copy.tensors)  # so far these are only the block's own tensors
            start = len(self.out.ops)
            self.add_items(columns[copy.segment.place], copy)
            tensors, kind = tuple(copy.tensors.values()), hash((id(copy.segment), traced_call))
            self.out.blocks.append(Block(kind, tensors, start, len(self.out.ops)))

    def add_watched(self) -> None:
        """Add what modules return, of each module in the order of its calls.

        A module outside of a stack may be called between its blocks.
        """
        owner, items = self.folding.owner, self.folded.timeline()
        calls = {name: item.traced_call for item in items for name in made_by(item)}
        watched = grouped(((module, slot), n) for module, slot, n in self.folded.watched)
        for (module, slot), names in watched.items():
            around = self.around(module)
            given = [(around or owner.get(name), name) for name in names]
            for (path, _), run in groupby(
                given, lambda x: (x[0] and x[0].stack.path, calls.get(x[1]))
            ):
                here = [*run]
                self.out.watched += [
                    (copy.modules[module], slot, copy.tensors[name])
                    for copy in (self.blocks[path] if path else [self.outside])
                    for segment, name in here
                    if segment is copy.segment
                ]

    def add_tensors(self, names: Mapping[str, str]) -> None:
        """Add copies of tensors; `names` maps folded names to names of the copies."""
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
        """Return `names` in every copy of the block that owns the last of them."""
        copies = self.copies_of(self.folding.owner.get(names[-1]))
        return [tuple(copy.tensors[n] for n in names) for copy in copies]

    def copies_of(self, segment: Segment | None) -> list[_Copy]:
        """Return the copies of `segment`; without one, the code outside of blocks."""
        return [self.outside] if segment is None else self.copies.get(id(segment), [])

    def around(self, module: str) -> Segment | None:
        """Return the segment of the traced block that contains `module`."""
        for row in self.folding.segments:
            place = place_of(row[0].stack, module)
            if place is not None:
                return row[place]
        return None
