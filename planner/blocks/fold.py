"""Fold the blocks of a stack: one set of variables per kind of block, with a count of its copies.

The graph of a shortened model (`stacks.py`) is cut into segments, one for each traced block.
Segments of two blocks of one kind must match item by item; their tensors then share a state.
Each block of the full stack is a copy of a traced segment: one of its own kind whose predecessor
has the same kind too. The graph of the full model follows from the segments, edges between blocks
included, without tracing it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from shardwright.planner.blocks.stacks import Stack
from shardwright.planner.contract.names import grouped, is_within
from shardwright.planner.graph.graph import Boundary, Graph, Item, Op, made_by, taken_by
from shardwright.rules.registry import rule_for


class Unfoldable(Exception):
    """Blocks that look the same differ in the graph; all blocks must be traced.

    `stacks` has the paths of the stacks that cannot be folded, if these are known, and `afar` those
    of them of which a block is read from afar.
    """

    def __init__(
        self, text: str = "", stacks: Collection[str] = (), afar: Collection[str] = ()
    ) -> None:
        super().__init__(text)
        self.stacks, self.afar = frozenset(stacks), frozenset(afar)
        self.in_priced_runs = False
        """Whether the blocks differ in the priced runs alone."""


class Unused(Unfoldable):
    """Stacks of which no block does anything, in any call."""


class ReadFromAfar(Unfoldable):
    """Code reads what a block that represents others computes."""

    def __init__(self, text: str, stacks: Collection[str]) -> None:
        super().__init__(text, stacks, afar=stacks)


class Idle(Unfoldable):
    """A block does nothing in some call, so code may skip it."""


@dataclass
class Segment:
    """The ops, boundaries and tensors of one traced block.

    `keys` maps each tensor that the block owns to its position in the block; `tensors` is the
    inverse.
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
        """Whether this is the segment of the last block."""
        return self.place == len(self.stack.picks) - 1

    @property
    def sole(self) -> bool:
        """Whether the full stack has exactly one block of this kind."""
        return self.stack.unique(self.kind)

    @property
    def blocks(self) -> list[int]:
        """Numbers of the blocks of the full stack that are copies of this one."""
        return [i for i, place in enumerate(self.stack.traced) if place == self.place]

    def own(self, key: object, name: str) -> None:
        """Add a tensor."""
        self.keys[name] = key
        self.tensors[key] = name


@dataclass
class Folding:
    """A graph with folded stacks; `graph.alike` and `graph.counts` describe the folding."""

    graph: Graph
    segments: list[list[Segment]] = field(default_factory=list)

    @property
    def stacks(self) -> list[Stack]:
        """The stacks that were folded."""
        return [row[0].stack for row in self.segments]

    @cached_property
    def owner(self) -> dict[str, Segment]:
        """Tensor -> segment that owns it."""
        return {n: s for row in self.segments for s in row for n in s.keys}

    def traced_name(self, name: str) -> str:
        """Return the module or parameter of the traced block that represents `name`."""
        for stack in self.stacks:
            if (block := stack.block(name)) is not None:
                pick = stack.picks[stack.traced[block]]
                return f"{stack.path}.{pick}{name.removeprefix(f'{stack.path}.{block}')}"
        return name


def fold(graph: Graph, stacks: Sequence[Stack], shared: frozenset[str] = frozenset()) -> Folding:
    """Fold the graph of a model that was shortened to the picked blocks of `stacks`.

    Args:
        graph: Graph of the shortened model; its `alike` and `counts` are filled in.
        stacks: The stacks that were shortened.
        shared: Full names of parameters in traced blocks that modules outside of them hold too.

    Raises:
        Unfoldable: blocks differ in the graph, or code away from a block uses its tensors.
    """
    folding = Folding(graph)
    small = {n for n in graph.inputs if prod(graph.tensors[n].shape) <= 1}
    small -= {n for op in graph.ops if graph.priced(op) for n in op.inputs}
    failed: dict[str, Unfoldable] = {}
    for stack in stacks:
        try:
            folding.segments.append(_folded(graph, stack, shared, small))
        except Unfoldable as error:
            failed[stack.path] = error
    if unused := {path for path, error in failed.items() if isinstance(error, Unused)}:
        raise Unused(str(failed[min(unused)]), unused)
    try:
        graph.marks.collected = collected(folding)
    except ReadFromAfar as error:
        if not failed:
            raise
        failed |= dict.fromkeys(error.stacks, error)
    if failed:
        error = min(failed.values(), key=lambda e: not isinstance(e, Idle))
        kind = Idle if isinstance(error, Idle) else Unfoldable
        raise kind(str(error), failed, set().union(*(e.afar for e in failed.values())))
    classes: dict[str, set[str]] = {}
    for name, one in graph.alike.items():
        classes.setdefault(one, {one}).add(name)

    def like(name: str) -> set[str]:
        return classes.get(graph.representative(name), {name})

    graph.marks = graph.marks.spread(like)
    return folding


def _folded(
    graph: Graph, stack: Stack, shared: frozenset[str], small: Collection[str]
) -> list[Segment]:
    """Return the segments of a stack, and note in `graph` which of their tensors are alike."""
    row = segments_of(graph, stack, shared)
    first: dict[int, Segment] = {}
    for segment in row:
        times = len(segment.blocks)
        for item in segment.items:
            graph.counts[item.name if isinstance(item, Op) else item.target] = times
        graph.counts |= dict.fromkeys(segment.keys, times)
        base = first.setdefault(segment.kind, segment)
        if base is not segment:
            match(graph, base, segment, row, small)
            graph.alike |= {segment.tensors[k]: n for k, n in base.tensors.items()}
    return row


def collected(folding: Folding) -> set[str]:
    """Return what unpriced runs read from blocks other than the last, and compute from that.

    Block tensors that the model returns are included. In the full model these runs read such
    tensors from more blocks, or from other blocks, than in the trace. Neither matters if all of
    them and their gradients are replicated.

    Raises:
        ReadFromAfar: a module takes a tensor that is computed from them.
    """
    graph, owner = folding.graph, folding.owner
    far = {n for n, segment in owner.items() if not segment.last and not segment.sole}
    given = far & {*graph.outputs}
    read, made, afar, why = set[str](), set[str](), set[str](), ""
    for item in graph.timeline():
        if graph.priced(item) or any(n in owner for n in made_by(item)):
            continue
        taken = {*taken_by(item)}
        if not taken & (far | made):
            continue
        if isinstance(item, Boundary) and item.side == "in":
            why = why or f"{item.module} takes what is read from blocks afar"
            afar |= read | taken
            continue
        read |= taken & far
        made |= {*made_by(item)}
    if afar:
        raise ReadFromAfar(why, _stacks(folding, afar))
    return made | given | _everywhere(folding, read) | _numbered(folding)


def _numbered(folding: Folding) -> set[str]:
    """Return the tensors of blocks that a module around these returns at a number.

    If it returns a list of them, the full model returns them at other numbers: a plan cannot
    redistribute them there.
    """
    out = set[str]()
    for b in folding.graph.boundaries:
        of_block = b.source in folding.owner or b.source in out  # a module further out gives it on
        numbered = b.side == "out" and b.slot.rpartition(".")[2].isdigit()
        around = any(is_within(stack.path, b.module) for stack in folding.stacks)
        if of_block and numbered and around:
            out.add(b.target)
    return out


def _everywhere(folding: Folding, names: set[str]) -> set[str]:
    """Return the tensors of all blocks at the output slots where some block returns one of `names`.

    Raises:
        ReadFromAfar: one of `names` is not an output of a module.
    """
    places: dict[tuple[str, str, str], set[str]] = {}
    for b in folding.graph.crossed:
        segment = folding.owner.get(b.target)
        if b.side == "out" and segment is not None:
            place = segment.stack.path, b.module.removeprefix(segment.module), b.slot
            places.setdefault(place, set()).add(b.target)
    found = set().union(*(given for given in places.values() if given & names))
    if not names <= found:
        afar = names - found
        raise ReadFromAfar(f"{min(afar)} is read from afar", _stacks(folding, afar))
    return found


def _stacks(folding: Folding, names: set[str]) -> set[str]:
    """Return the paths of the stacks whose blocks own any of these tensors."""
    return {folding.owner[name].stack.path for name in names if name in folding.owner}


def segments_of(graph: Graph, stack: Stack, shared: frozenset[str]) -> list[Segment]:
    """Cut the timeline into the segments of the traced blocks of a stack.

    Items between two blocks belong to the segment of the second block.
    """
    row = [Segment(stack, place) for place in range(len(stack.picks))]
    for items in grouped((item.traced_call, item) for item in graph.timeline()).values():
        if any(place_of(stack, item.module) is not None for item in items):
            _cut(items, row)
    if not any(segment.items for segment in row):
        raise Unused(f"no block of {stack.path} does anything")
    for segment in row:
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
    """Add the items of one traced call to the segments."""
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
    """Return the place among `picks` of the block that contains `name`; None if there is none."""
    block = stack.block(name)
    return None if block is None else stack.picks.index(block)


def match(
    graph: Graph, one: Segment, other: Segment, row: Sequence[Segment], small: Collection[str]
) -> None:
    """Compare two segments of blocks of one kind.

    The segments may read different tensors of `small` (for example empty caches); these are too
    small to be sharded. Constants are never sharded.

    Raises:
        Unfoldable: the segments differ in their ops or in the tensors that they take.
    """
    if len(one.items) != len(other.items) or one.tensors.keys() != other.tensors.keys():
        raise Unfoldable(f"{one.module} and {other.module} differ in length")
    owned = {name for segment in row for name in segment.keys}
    for a, b in zip(one.items, other.items, strict=True):
        if not _same(a, b, one, other):
            raise Unfoldable(f"{one.module} and {other.module} differ at {a} and {b}")
        if isinstance(a, Op) and _trained(graph, a) != _trained(graph, b):
            # Of the last block, nothing may read an output that the next block reads of others.
            raise Unfoldable(f"only one of {one.module} and {other.module} has a gradient at {a}")
        for x, y in zip(taken_by(a), taken_by(b), strict=True):
            if x in one.keys or y in other.keys:
                fits = one.keys.get(x) == other.keys.get(y)
            else:
                before = _behind(x, one, row) or (one.place == 0 and x not in owned)
                fits = x == y or (before and _behind(y, other, row)) or (x in small and y in small)
                fits = fits or _constants(graph, x, y)
            if not fits:
                raise Unfoldable(f"{one.module} takes {x} where {other.module} takes {y}")


def _constants(graph: Graph, x: str, y: str) -> bool:
    """Return whether both are constants, of one shape and dtype."""
    a, b = graph.tensors[x], graph.tensors[y]
    return {x, y} <= graph.constants and (a.shape, a.dtype) == (b.shape, b.dtype)


def _trained(graph: Graph, item: Item) -> list[bool]:
    return [graph.tensors[name].differentiable for name in made_by(item)]


def _behind(name: str, segment: Segment, row: Sequence[Segment]) -> bool:
    """Return whether `name` belongs to the block before the block of `segment`."""
    return segment.place > 0 and name in row[segment.place - 1].keys


def _same(a: Item, b: Item, one: Segment, other: Segment) -> bool:
    if a.module.removeprefix(one.module) != b.module.removeprefix(other.module):
        return False
    if type(a) is not type(b) or a.traced_call != b.traced_call:
        return False
    if isinstance(a, Boundary) and isinstance(b, Boundary):
        return (a.side, a.slot, a.has_parameters) == (b.side, b.slot, b.has_parameters)
    assert isinstance(a, Op) and isinstance(b, Op), "an item is one of both"
    if a.literals != b.literals or len(a.inputs) != len(b.inputs):
        return False
    x, y = a.call, b.call
    if x == y:
        return True
    return replace(x, arguments={}) == replace(y, arguments={}) and rule_for(x) == rule_for(y)
