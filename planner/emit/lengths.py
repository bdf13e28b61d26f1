"""Comparisons of lengths in the code of a model, as text over the arguments of its forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from shardwright.planner.contract.lengths import (
    OPPOSITE,
    holds,
    is_between_lengths,
    numbers_in,
    sizes_in,
)
from shardwright.planner.graph.axes import Axes, atoms_of
from shardwright.planner.graph.graph import Graph

SAMPLES = (*range(2, 66), 100, 1000, 4096, 1 << 17, (1 << 20) + 7)
"""Lengths with which it is tried whether a comparison can come out otherwise. A length of 1 is not
among them: most code compares with 1 only to broadcast, or to leave out a mask."""

Slots = dict[frozenset[int], str]
"""Axes of a dim -> the dim of an argument, as text."""


def compared_lengths(graph: Graph, axes: Axes) -> dict[str, str]:
    """Return the comparisons that hold in all traced calls, each with its place in the code.

    Only those of lengths of arguments with a number are returned, if they come out otherwise for
    other lengths. Numbers of dims that code asks for count, too.
    """
    slots: Slots = {}
    traced: dict[str, set[int]] = {}
    given = dict(_arguments(graph))
    for name, argument in given.items():
        for dim, tree in enumerate(axes.dims[name]):
            traced.setdefault(f"{argument}.shape[{dim}]", set()).add(graph.tensors[name].shape[dim])
            if ids := _ids(tree):
                slots.setdefault(ids, f"{argument}.shape[{dim}]")
    outcomes: dict[tuple[str, str, str, str], set[bool]] = {}
    for test in graph.length_tests:
        if graph.left and (_has_attribute(test.left) or _has_attribute(test.right)):
            continue  # calls may change the attributes
        left, right = (_text(side, graph, axes, slots, given) for side in (test.left, test.right))
        if left and right:
            outcomes.setdefault((test.where, left, test.sign, right), set()).add(test.outcome)
    found = {}
    for (where, left, sign, right), seen in outcomes.items():
        if len(seen) == 1:
            text = f"{left} {sign if True in seen else OPPOSITE[sign]} {right}"
            if _varies(text, traced):
                found.setdefault(text, where)
    for name, where in graph.asked_dims.items():
        alike = [n for n, argument in given.items() if argument == given.get(name)]
        if len({len(graph.tensors[n].shape) for n in alike}) == 1:
            found.setdefault(f"{given[name]}.ndim == {len(graph.tensors[name].shape)}", where)
    return found


def _arguments(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the tensors that are arguments of the model, each with the argument."""
    floats = [(b.module, b.side, b.slot, b.source) for b in graph.boundaries]
    others = [(*passed.slot[:3], passed.name) for _, passed in graph.passed if passed.name]
    for module, side, slot, name in (*floats, *others):
        if module == "" and side == "in" and slot.isidentifier() and name in graph.tensors:
            yield name, slot


def _ids(tree: Any) -> frozenset[int]:
    return frozenset(a.id for a in atoms_of(tree))


def _has_attribute(side: tuple[Any, ...]) -> bool:
    return side[0] == "attribute" or any(_has_attribute(x) for x in side if type(x) is tuple)


def _text(
    side: tuple[Any, ...], graph: Graph, axes: Axes, slots: Slots, given: Mapping[str, str]
) -> str | None:
    """Return an expression of sizes as text; None if no argument has one of its lengths."""
    head, *rest = side
    if head == "constant":
        return str(int(rest[0]))
    if head == "attribute":
        return str(int(rest[2]))
    if head == "read":
        name = graph.reads.get(rest[1], "")
        if name in given:
            return f"{given[name]}.shape[{rest[2]}]"
        dims = axes.dims.get(name, ())
        return _named(_ids(dims[rest[2]]), slots) if rest[2] < len(dims) else None
    texts = [_text(tuple(one), graph, axes, slots, given) for one in rest]
    return None if None in texts else f"({texts[0]} {head} {texts[1]})"


def _named(ids: frozenset[int], slots: Slots) -> str | None:
    """Return the dim of an argument that has these axes, or the product of two, as text."""
    if found := slots.get(ids):
        return found
    pairs = ((one, ids - one) for one in slots if one < ids)
    return next((f"({slots[a]} * {slots[b]})" for a, b in pairs if b in slots), None)


def _varies(text: str, traced: Mapping[str, set[int]]) -> bool:
    """Whether a comparison with a number holds for traced lengths, and not for all lengths."""
    named = sorted({f"{argument}.shape[{dim}]" for argument, dim in sizes_in(text)})
    if len(named) > 2 or not named or (len(named) == 2 and is_between_lengths(text)):
        return False
    near = {m for n in numbers_in(text) for m in (n - 1, n, n + 1) if m > 1}
    samples = [*SAMPLES, *near] if len(named) == 1 else [2, 3, 64, 1 << 20]

    def held(sizes: Iterable[Iterable[int]]) -> bool:
        return all(holds(text, dict(zip(named, one, strict=True))) for one in product(*sizes))

    return held(traced[name] for name in named) and not held(samples for _ in named)
