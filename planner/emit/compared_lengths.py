"""Comparisons of lengths in the code of a model, as text over the arguments of its forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

from shardwright.planner.contract.length_comparisons import (
    OPPOSITE,
    holds,
    is_between_lengths,
    numbers_in,
    sizes_in,
)
from shardwright.planner.contract.names import made_once
from shardwright.planner.graph.axes import Axes, Dim, leaves_of
from shardwright.planner.graph.graph import Graph
from shardwright.planner.graph.lost_lengths import varying

SAMPLES = (*range(2, 66), 100, 1000, 4096, 1 << 17, (1 << 20) + 7)
"""Lengths with which it is tried whether a comparison can come out otherwise. A length of 1 is not
among them: most code compares with 1 only to broadcast, or to leave out a mask."""

FEW = (2, 3, 64, 1 << 20)
"""Those for comparisons of several lengths."""

LOOPS = 4
"""Comparisons in one place of the code beyond which it is a loop."""

MAX_NAMED = 4
"""Lengths in a comparison; a product of them is the number of elements of an argument."""


Compared = tuple[dict[str, str], dict[str, set[str]]]

_by_axes: WeakKeyDictionary[Axes, Compared] = WeakKeyDictionary()


def compared_lengths(graph: Graph, axes: Axes) -> dict[str, str]:
    """Return the comparisons that hold in all traced calls, each with its place in the code.

    Only those of lengths of arguments with a number are returned, if they come out otherwise for
    other lengths. Numbers of dims that code asks for count, too.
    """
    return _compared(graph, axes)[0]


def undecided_lengths(graph: Graph, axes: Axes) -> list[str]:
    """Return all comparisons with numbers that came out the same, for calls of other lengths."""
    guarded, others = _compared(graph, axes)
    return [*guarded, *others]


def keep_beside_unguarded(graph: Graph, axes: Axes) -> None:
    """Mark the tensors of code that compares lengths, where no call can be checked for it.

    That is so for lengths that arguments do not have (of a convolution's output), and for
    comparisons that only some of the traced calls make.
    """
    marks = graph.marks
    modules = {module for of in _compared(graph, axes)[1].values() for module in of}
    marks.decided_unseen |= {name for name, module in marks.beside_tests if module in modules}


def _compared(graph: Graph, axes: Axes) -> Compared:
    """Return the comparisons of a graph with these axes; they are computed once."""
    return made_once(_by_axes, axes, lambda: _comparisons(graph, axes))


def _comparisons(graph: Graph, axes: Axes) -> Compared:
    """Return the comparisons that calls are checked for, and others, with modules that make them.

    Others are those of one length, which is neither 1 nor one of a cache. Code also compares masks
    with sums of lengths, which must not keep a module whole. A loop over blocks compares a length
    with the end of each: both answers of it are traced with any length.
    """
    names = _Names(graph, axes)
    outcomes: dict[tuple[str, str, str, str], list[Any]] = {}
    for test in graph.length_tests:
        if _may_change(graph, test.left) or _may_change(graph, test.right):
            continue
        left, right = names.text(test.left), names.text(test.right)
        outcomes.setdefault((test.where, left, test.sign, right), []).append(test)
    found: dict[str, str] = {}
    unguarded: dict[str, set[str]] = {}
    places = Counter(where for where, *_ in outcomes)
    for (where, left, sign, right), tests in outcomes.items():
        seen = {test.outcome for test in tests}
        text = f"{left} {sign if True in seen else OPPOSITE[sign]} {right}"
        if len(seen) > 1 or not _varies(text):
            continue
        named = _lengths_in(text)
        if names.traced.keys() >= {*named} and _held(text, names.traced):
            found.setdefault(text, where)
        elif len(named) == 1 and not names.exempt & {*named} and places[where] <= LOOPS:
            unguarded.setdefault(text, set()).update(test.module for test in tests)
    given = names.given
    for name, where in graph.asked_dims.items():
        alike = [n for n, argument in given.items() if argument == given.get(name)]
        if len({len(graph.tensors[n].shape) for n in alike}) == 1:
            found.setdefault(f"{given[name]}.ndim == {len(graph.tensors[name].shape)}", where)
    return found, unguarded


class _Names:
    """Names of lengths.

    Attributes:
        given: Tensor that is an argument of the model -> the argument.
        traced: Length of an argument, as text -> its values in the traced calls.
        exempt: Lengths that no argument has, of tensors in caches or 1, as text. Caches are checked
            by themselves, and so are decoding steps, which are of one token.
    """

    def __init__(self, graph: Graph, axes: Axes) -> None:
        self.graph, self.axes = graph, axes
        self.given = dict(_arguments(graph))
        self.traced: dict[str, set[int]] = {}
        self.exempt: set[str] = set()
        self._in_caches = {name for pair in graph.marks.resumed for name in pair}
        self._slots: dict[tuple[frozenset[int], int], str] = {}
        self._varies = varying(graph, axes)
        made = (s for s in graph.sizes if not s.bound and not _may_change(graph, s.expression))
        self._made_of = {(s.tensor, s.dim): s.expression for s in made}
        for name, argument in self.given.items():
            for dim, tree in enumerate(axes.dims[name]):
                text = f"{argument}.shape[{dim}]"
                self.traced.setdefault(text, set()).add(graph.tensors[name].shape[dim])
                if ids := _ids(tree):
                    self._slots.setdefault((ids, tree.size), text)

    def text(self, side: tuple[Any, ...]) -> str:
        """Return an expression of sizes as text."""
        head, *rest = side
        if head == "constant":
            return str(int(rest[0]))
        if head == "attribute":
            return str(int(rest[2]))
        if head == "read":
            return self._read(*rest)
        left, right = (self.text(tuple(one)) for one in rest)
        unit = {"*": "1", "+": "0"}.get(head)
        return right if left == unit else f"({left} {head} {right})"

    def _read(self, size: int, number: int, dim: int) -> str:
        name = self.graph.reads.get(number, "")
        if name in self.given:
            return f"{self.given[name]}.shape[{dim}]"
        if name in self._in_caches or size == 1:
            self.exempt.add(f"_{number}.shape[{dim}]")
        dims = self.axes.dims.get(name, ())
        if dim < len(dims):
            if found := self._of_arguments(dims[dim]):
                return found
            if not self._varies(dims[dim]):
                return str(size)
        if made_of := self._made_of.get((name, dim)):
            return self.text(made_of)
        return f"_{number}.shape[{dim}]"

    def _of_arguments(self, dim: Dim) -> str | None:
        """Return the dim of an argument that has the axes of `dim`, or the product of two.

        The same axes in another number, as of a concatenation with itself, are another length.
        """
        ids, size, slots = _ids(dim), dim.size, self._slots
        if found := slots.get((ids, size)):
            return found
        parts = ((one, n) for one, n in slots if one < ids and not size % n)
        pairs = (((one, n), (ids - one, size // n)) for one, n in parts)
        return next((f"({slots[a]} * {slots[b]})" for a, b in pairs if b in slots), None)


def _arguments(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the tensors that are arguments of the model, each with the argument."""
    floats = [(b.module, b.side, b.slot, b.source) for b in graph.boundaries]
    others = [(*passed.slot[:3], passed.name) for _, passed in graph.passed if passed.name]
    for module, side, slot, name in (*floats, *others):
        if module == "" and side == "in" and slot.isidentifier() and name in graph.tensors:
            yield name, slot


def _ids(dim: Dim) -> frozenset[int]:
    """Return the axes of a dim that is longer than 1, with those of length 1 in it."""
    return frozenset(leaf.id for leaf in leaves_of(dim)) if dim.size > 1 else frozenset()


def _may_change(graph: Graph, side: tuple[Any, ...]) -> bool:
    """Whether an expression has an attribute, if calls may change attributes."""
    return graph.leaves_attributes and _has_attribute(side)


def _has_attribute(side: tuple[Any, ...]) -> bool:
    return side[0] == "attribute" or any(_has_attribute(x) for x in side if type(x) is tuple)


def _varies(text: str) -> bool:
    """Whether a comparison with a number does not hold for all lengths."""
    named = _lengths_in(text)
    if len(named) > MAX_NAMED or not named or (len(named) > 1 and is_between_lengths(text)):
        return False
    near = {m for n in numbers_in(text) for m in (n - 1, n, n + 1) if m > 1}
    samples = [*SAMPLES, *near] if len(named) == 1 else FEW
    return not _held(text, dict.fromkeys(named, samples))


def _held(text: str, sizes: Mapping[str, Iterable[int]]) -> bool:
    """Whether a comparison holds for all these sizes of lengths, by their text."""
    named = _lengths_in(text)
    all_sizes = product(*(sizes[name] for name in named))
    return all(holds(text, dict(zip(named, one, strict=True))) for one in all_sizes)


def _lengths_in(text: str) -> list[str]:
    return sorted({f"{argument}.shape[{dim}]" for argument, dim in sizes_in(text)})
