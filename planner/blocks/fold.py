"""Fold the blocks of a stack: one set of variables for each kind, counted as often as it stands.

The graph of a shortened model (`stacks.py`) is cut into segments, one for each traced block. Where
two blocks are of one kind their segments must match item by item; then their tensors are alike.
Each block of the whole stack is a copy of the segment of a block of its kind behind one of the
same kind, so the whole graph follows, edges between blocks included, and is never traced.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from shardwright.planner.blocks.stacks import Stack
from shardwright.planner.graph.graph import Boundary, Graph, Op
from shardwright.rules.registry import rule_for

Item = Op | Boundary


class Unfoldable(Exception):
    """The blocks are not as alike as they are made; all blocks must be traced."""


class Idle(Unfoldable):
    """A block does nothing in some call: code may skip it."""


@dataclass
class Segment:
    """What the graph holds of one traced block.

    `keys` names each tensor that the block owns by where it stands in it, `tensors` is the inverse.
    """

    stack: Stack
    place: int
    items: list[Item] = field(default_factory=list)
    keys: dict[str, object] = field(default_factory=dict)
    tensors: dict[object, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """Name of the block."""
        return f"{self.stack.path}.{self.stack.picks[self.place]}"

    @property
    def kind(self) -> int:
        """Kind of the block."""
        return self.stack.kinds[self.stack.picks[self.place]]

    @property
    def last(self) -> bool:
        """Whether it is that of the last block."""
        return self.place == len(self.stack.picks) - 1

    @property
    def sole(self) -> bool:
        """Whether the whole stack has one block of its kind."""
        return self.stack.unique(self.kind)

    @property
    def blocks(self) -> list[int]:
        """Numbers of the blocks of the whole stack that are copies of this one."""
        return [i for i, place in enumerate(self.stack.traced) if place == self.place]

    def own(self, key: object, name: str) -> None:
        """Add a tensor."""
        self.keys[name] = key
        self.tensors[key] = name


@dataclass
class Folding:
    """A graph whose stacks are folded: `graph.alike` and `graph.counts` say how."""

    graph: Graph
    segments: list[list[Segment]] = field(default_factory=list)

    @property
    def stacks(self) -> list[Stack]:
        """What was folded."""
        return [row[0].stack for row in self.segments]

    @cached_property
    def owner(self) -> dict[str, Segment]:
        """Tensor -> the segment that it belongs to."""
        return {n: s for row in self.segments for s in row for n in s.keys}

    def traced_name(self, name: str) -> str:
        """The module or parameter of a traced block that stands for this one of any block."""
        for stack in self.stacks:
            if (block := stack.block(name)) is not None:
                pick = stack.picks[stack.traced[block]]
                return f"{stack.path}.{pick}{name.removeprefix(f'{stack.path}.{block}')}"
        return name


def fold(graph: Graph, stacks: Sequence[Stack], shared: frozenset[str] = frozenset()) -> Folding:
    """Fold the graph of a model that was shortened to the picked blocks of `stacks`.

    Args:
        graph: Traced from the shortened model; its `alike` and `counts` are filled in.
        stacks: What was shortened.
        shared: Full names of parameters in traced blocks that modules outside of them hold too.

    Raises:
        Unfoldable: the graph shows that blocks differ, or that one is used from afar.
    """
    folding = Folding(graph)
    small = {n for n in graph.inputs if prod(graph.tensors[n].shape) <= 1}
    small -= {n for op in graph.ops if graph.priced(op) for n in op.inputs}
    for stack in stacks:
        row = segments_of(graph, stack, shared)
        folding.segments.append(row)
        first: dict[int, Segment] = {}
        for segment in row:
            times = len(segment.blocks)
            for item in segment.items:
                graph.counts[item.name if isinstance(item, Op) else item.target] = times
            graph.counts |= dict.fromkeys(segment.keys, times)
            base = first.setdefault(segment.kind, segment)
            if base is not segment:
                match(base, segment, row, small)
                graph.alike |= {segment.tensors[k]: n for k, n in base.tensors.items()}
    classes: dict[str, set[str]] = {}
    for name, one in graph.alike.items():
        classes.setdefault(one, {one}).add(name)

    def like(name: str) -> set[str]:
        return classes.get(graph.one(name), {name})

    graph.marks.collected = collected(folding)
    graph.marks = graph.marks.spread(like)
    return folding


def collected(folding: Folding) -> set[str]:
    """What runs that cost nothing read from blocks, not the last, and make of it, or give out.

    In the whole model they read more of the same than in the trace, or that of another block: where
    all of it is replicated, and so are its gradients, it does not matter how much, and of which.

    Raises:
        Unfoldable: modules take what is made of it.
    """
    graph, owner = folding.graph, folding.owner
    far = {n for n, segment in owner.items() if not segment.last and not segment.sole}
    given = far & {*graph.outputs}
    read, made = set[str](), set[str]()
    for item in timeline(graph):
        if graph.priced(item) or any(n in owner for n in made_by(item)):
            continue
        taken = {*taken_by(item)}
        if not taken & (far | made):
            continue
        if isinstance(item, Boundary) and item.side == "in":
            raise Unfoldable(f"{item.module} takes what is read from blocks afar")
        read |= taken & far
        made |= {*made_by(item)}
    return made | given | _everywhere(folding, read)


def _everywhere(folding: Folding, names: set[str]) -> set[str]:
    """What all blocks give out in the places in which some give these out.

    Raises:
        Unfoldable: one is given out by no module.
    """
    places: dict[tuple[str, str, str], set[str]] = {}
    for b in folding.graph.crossed:
        segment = folding.owner.get(b.target)
        if b.side == "out" and segment is not None:
            place = segment.stack.path, b.module.removeprefix(segment.module), b.slot
            places.setdefault(place, set()).add(b.target)
    found = set().union(*(given for given in places.values() if given & names))
    if not names <= found:
        raise Unfoldable(f"{min(names - found)} is read from afar")
    return found


def timeline(graph: Graph) -> list[Item]:
    """Ops and boundaries in the order in which they ran."""
    made: dict[str, Item] = {b.target: b for b in graph.boundaries}
    made |= {out: op for op in graph.ops for out in op.outputs}
    found = (made.get(name) for name in graph.tensors)
    return list({id(item): item for item in found if item is not None}.values())


def segments_of(graph: Graph, stack: Stack, shared: frozenset[str]) -> list[Segment]:
    """Cut the timeline into the segments of the traced blocks of a stack.

    What the module around does between two blocks belongs to the second of them.
    """
    row = [Segment(stack, place) for place in range(len(stack.picks))]
    calls: dict[int, list[Item]] = {}
    for item in timeline(graph):
        calls.setdefault(item.traced_call, []).append(item)
    for items in calls.values():
        if any(place_of(stack, item.module) is not None for item in items):
            _cut(items, row)
    for segment in row:
        if not segment.items:
            raise Unfoldable(f"block {segment.module} does nothing")
        made = (n for item in segment.items for n in made_by(item))
        for number, name in enumerate(made):
            segment.own(number, name)
    holders: dict[str, set[int | None]] = {}
    for use in graph.uses:
        holders.setdefault(use.stored, set()).add(place_of(stack, use.fqn))
    for use in graph.uses:
        place = place_of(stack, use.fqn)
        if place is None:
            continue
        name = use.fqn.removeprefix(row[place].module)
        row[place].own(("used", name), use.used)
        if len(holders[use.stored]) == 1 and use.fqn not in shared:
            row[place].own(("stored", name), use.stored)
    return row


def _cut(items: Sequence[Item], row: Sequence[Segment]) -> None:
    """Give the segments their items of one run."""
    stack = row[0].stack
    places = [place_of(stack, item.module) for item in items]
    spans = []
    for segment in row:
        at = [i for i, place in enumerate(places) if place == segment.place]
        if not at:
            raise Idle(f"block {segment.module} does nothing")
        spans.append((at[0], at[-1] + 1))
    gaps = {b[0] - a[1] for a, b in zip(spans, spans[1:], strict=False)}
    if len(gaps) != 1 or min(gaps) < 0:
        raise Unfoldable(f"what stands between the blocks of {stack.path} differs")
    (gap,) = gaps
    for segment, (start, stop) in zip(row, spans, strict=True):
        segment.items += items[max(start - gap, 0) : stop]


def place_of(stack: Stack, name: str) -> int | None:
    """Place of the traced block that the module or parameter `name` is in."""
    block = stack.block(name)
    return None if block is None else stack.picks.index(block)


def made_by(item: Item) -> tuple[str, ...]:
    """The tensors that an item makes."""
    return item.outputs if isinstance(item, Op) else (item.target,)


def taken_by(item: Item) -> tuple[str, ...]:
    """The tensors that an item takes."""
    return item.inputs if isinstance(item, Op) else (item.source,)


def match(one: Segment, other: Segment, row: Sequence[Segment], small: Collection[str]) -> None:
    """Compare two segments of blocks of one kind.

    Each may begin with its own of the tensors `small`, which nothing splits: with empty caches.

    Raises:
        Unfoldable: they do different things, or take different tensors.
    """
    if len(one.items) != len(other.items) or one.tensors.keys() != other.tensors.keys():
        raise Unfoldable(f"{one.module} and {other.module} differ in length")
    owned = {name for segment in row for name in segment.keys}
    for a, b in zip(one.items, other.items, strict=True):
        if not _same(a, b, one, other):
            raise Unfoldable(f"{one.module} and {other.module} differ at {a} and {b}")
        for x, y in zip(taken_by(a), taken_by(b), strict=True):
            if x in one.keys or y in other.keys:
                fits = one.keys.get(x) == other.keys.get(y)
            else:
                before = _behind(x, one, row) or (one.place == 0 and x not in owned)
                fits = x == y or (before and _behind(y, other, row)) or (x in small and y in small)
            if not fits:
                raise Unfoldable(f"{one.module} takes {x} where {other.module} takes {y}")


def _behind(name: str, segment: Segment, row: Sequence[Segment]) -> bool:
    """Whether `name` comes from the block before that of `segment`."""
    return segment.place > 0 and name in row[segment.place - 1].keys


def _same(a: Item, b: Item, one: Segment, other: Segment) -> bool:
    if a.module.removeprefix(one.module) != b.module.removeprefix(other.module):
        return False
    if a.traced_call != b.traced_call:
        return False
    if isinstance(a, Boundary) or isinstance(b, Boundary):
        return (
            isinstance(a, Boundary)
            and isinstance(b, Boundary)
            and (a.side, a.slot, a.has_parameters) == (b.side, b.slot, b.has_parameters)
        )
    if a.literals != b.literals or len(a.inputs) != len(b.inputs):
        return False
    x, y = a.call, b.call
    if x == y:
        return True
    alike = (x.op, x.operands, x.results, x.operand_dtypes, x.result_dtypes) == (
        y.op,
        y.operands,
        y.results,
        y.operand_dtypes,
        y.result_dtypes,
    )
    return alike and rule_for(x) == rule_for(y)
