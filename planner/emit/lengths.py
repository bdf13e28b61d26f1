"""Comparisons of lengths in the code of a model, as text over the arguments of its forward."""

from __future__ import annotations

from itertools import product
from typing import Any

from shardwright.planner.contract.lengths import OPPOSITE, holds
from shardwright.planner.graph.axes import Axes, atoms_of
from shardwright.planner.graph.graph import Graph

SAMPLES = (1, 2, 3, 5, 8, 19, 100, 1000, 4096, 1 << 17, (1 << 20) + 7)
"""Lengths with which it is tried whether a comparison can come out otherwise."""

MOST = 3
"""The most lengths of one comparison that is tried."""

Slots = dict[frozenset[int], str]
"""Axes of a dim -> the dim of an argument, as text."""


def compared_lengths(graph: Graph, axes: Axes) -> dict[str, str]:
    """Return the comparisons that hold in all traced calls, each with its place in the code.

    Those with lengths that no argument has (of a cache, or decided by data) are left out, and those
    that come out the same for any lengths.
    """
    slots: Slots = {}
    for b in graph.boundaries:
        if b.module == "" and b.side == "in" and b.slot.isidentifier():
            for dim, tree in enumerate(axes.dims[b.source]):
                slots.setdefault(_ids(tree), f"{b.slot}.shape[{dim}]")
    outcomes: dict[tuple[str, str, str, str], set[bool]] = {}
    for test in graph.length_tests:
        left, right = (_text(side, graph, axes, slots) for side in (test.left, test.right))
        if left and right:
            outcomes.setdefault((test.where, left, test.sign, right), set()).add(test.outcome)
    found = {}
    for (where, left, sign, right), seen in outcomes.items():
        if len(seen) == 1:
            text = f"{left} {sign if True in seen else OPPOSITE[sign]} {right}"
            if _varies(text, [s for s in dict.fromkeys(slots.values()) if s in text]):
                found.setdefault(text, where)
    return found


def _ids(tree: Any) -> frozenset[int]:
    return frozenset(a.id for a in atoms_of(tree))


def _text(side: tuple[Any, ...], graph: Graph, axes: Axes, slots: Slots) -> str | None:
    """Return an expression of sizes as text; None if no argument has one of its lengths."""
    head, *rest = side
    if head == "constant":
        return str(int(rest[0]))
    if head == "attribute":
        return str(int(rest[2]))
    if head == "read":
        dims = axes.dims.get(graph.reads.get(rest[1], ""), ())
        if rest[2] >= len(dims):
            return None
        if dims[rest[2]].size == 1 or not (ids := _ids(dims[rest[2]])):
            return str(int(rest[0]))
        parts = [slots.get(frozenset({i})) for i in sorted(ids)]
        whole = [slots[ids]] if ids in slots else parts
        return None if None in whole else " * ".join(map(str, whole))
    texts = [_text(tuple(one), graph, axes, slots) for one in rest]
    return None if None in texts else f"({texts[0]} {head} {texts[1]})"


def _varies(text: str, slots: list[str]) -> bool:
    """Whether a comparison comes out otherwise for some lengths."""
    if not slots or len(slots) > MOST:
        return bool(slots)
    for sizes in product(SAMPLES, repeat=len(slots)):
        if not holds(text, dict(zip(slots, sizes, strict=True))):
            return True
    return False
