"""The whole graph from the folded one: copies of the traced blocks, edges between them included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.planner.folding import (
    Folding,
    Item,
    Segment,
    Unfoldable,
    made_by,
    place_of,
    taken_by,
    timeline,
)
from shardwright.planner.graph import Border, Graph, Op


@dataclass
class Unfolded:
    """The whole graph, and which tensor or op of the folded one each of its own is a copy of."""

    graph: Graph
    origin: dict[str, str]


def unfold(folding: Folding) -> Unfolded:
    """Copy the segments of the traced blocks for every block of the whole stacks.

    Raises:
        Unfoldable: a block is read from afar.
    """
    if not folding.segments:
        graph = folding.graph
        return Unfolded(graph, {n: n for n in (*graph.tensors, *(op.name for op in graph.ops))})
    return _Unfolder(folding).run()


class _Unfolder:
    """Goes through the folded graph once and writes the whole one."""

    def __init__(self, folding: Folding) -> None:
        self.folding, self.folded = folding, folding.graph
        self.out, self.origin = Graph(), dict[str, str]()
        self.rows = {row[0].stack.path: row for row in folding.segments}

    def run(self) -> Unfolded:
        """The whole graph."""
        g = self.folded
        for name in g.tensors:
            if name not in self.folding.owner:
                self.tensor(name, name)
        within = {id(i): s for row in self.folding.segments for s in row for i in s.items}
        done: set[str] = set()
        for item in timeline(g):
            segment = within.get(id(item))
            if segment is None:
                self.item(item, None, 0)
            elif segment.stack.path not in done:
                done.add(segment.stack.path)
                row = self.rows[segment.stack.path]
                for block, place in enumerate(segment.stack.traced):
                    for name in row[place].keys:
                        self.tensor(f"{name}@{block}", name)
                    for each in row[place].items:
                        self.item(each, row[place], block)
        for use in g.uses:
            for segment, block in self.copies_of(use.used):
                stored = self.name(use.stored, segment, block)
                used = self.name(use.used, segment, block)
                fqn = self.module(use.fqn, segment, block)
                self.out.uses.append(replace(use, fqn=fqn, stored=stored, used=used))
        for module, slot, name in g.watched:
            for segment, block in self.copies_in(module):
                made = self.name(name, segment, block)
                self.out.watched.append((self.module(module, segment, block), slot, made))
        self.out.inputs = list(g.inputs)
        self.out.outputs = [self.name(n, None, 0) for n in g.outputs]
        copies: dict[str, list[str]] = {}
        for copy, name in self.origin.items():
            copies.setdefault(name, []).append(copy)
        self.out.alike = {c: found[0] for found in copies.values() for c in found[1:]}
        self.out.logits = {c for n in g.logits for c in copies.get(n, ())}
        self.out.carried = {c for n in g.carried for c in copies.get(n, ())}
        self.out.fixed = {(c, d) for n, d in g.fixed for c in copies.get(n, ())}
        self.out.counted = {(c, d) for n, d in g.counted for c in copies.get(n, ())}
        self.out.pinned = g.pinned
        return Unfolded(self.out, self.origin)

    def tensor(self, name: str, origin: str) -> None:
        """Add a tensor."""
        self.out.tensors[name] = self.folded.tensors[origin]
        self.origin[name] = origin

    def item(self, item: Item, segment: Segment | None, block: int) -> None:
        """Add a copy of an op or border, as it stands in block number `block`."""
        module = self.module(item.module, segment, block)
        taken = tuple(self.name(n, segment, block) for n in taken_by(item))
        made = tuple(self.name(n, segment, block) for n in made_by(item))
        if isinstance(item, Border):
            copy = Border(module, item.side, item.slot, taken[0], made[0], item.has_parameters)
            self.out.borders.append(copy)
            return
        name = item.name if segment is None else f"{item.name}@{block}"
        self.out.ops.append(Op(name, item.call, taken, made, module, item.source, item.literals))
        self.origin[name] = item.name

    def copies_of(self, tensor: str) -> Iterator[tuple[Segment | None, int]]:
        """The blocks that have a copy of `tensor`."""
        segment = self.folding.owner.get(tensor)
        if segment is None:
            yield None, 0
        else:
            yield from ((segment, i) for i in segment.blocks)

    def copies_in(self, module: str) -> Iterator[tuple[Segment | None, int]]:
        """The blocks that have a copy of `module`."""
        for row in self.folding.segments:
            place = place_of(row[0].stack, module)
            if place is not None:
                yield from ((row[place], i) for i in row[place].blocks)
                return
        yield None, 0

    @staticmethod
    def module(module: str, segment: Segment | None, block: int) -> str:
        """Name of a module or parameter as it stands in block number `block`."""
        if segment is None or not (module + ".").startswith(segment.module + "."):
            return module
        return f"{segment.stack.path}.{block}{module.removeprefix(segment.module)}"

    def name(self, tensor: str, segment: Segment | None, block: int) -> str:
        """The copy of `tensor` that block number `block` takes or makes."""
        owner = self.folding.owner.get(tensor)
        if owner is None:
            return tensor
        stack, key = owner.stack, owner.keys[tensor]
        if owner is segment:
            return f"{tensor}@{block}"
        row = self.rows[stack.path]
        if segment is not None and segment.stack is stack and owner.place == segment.place - 1:
            return f"{row[stack.traced[block - 1]].tensors[key]}@{block - 1}"
        if stack.unique(owner.kind):
            return f"{tensor}@{stack.picks[owner.place]}"
        inside = segment is not None and segment.stack is stack
        if owner.place == len(row) - 1 and not inside:
            last = len(stack.kinds) - 1
            return f"{row[stack.traced[last]].tensors[key]}@{last}"
        raise Unfoldable(f"{owner.module} is read from afar")
