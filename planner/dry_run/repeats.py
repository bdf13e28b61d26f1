"""What code repeats (`x.repeat(n, 1)`): a plan may split what that makes, and `n` is less then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwright.planner.graph.graph import Graph
from shardwright.planner.trace.trial.call_log import Numbers, Repeats, repeated

Sizes = Sequence[int]


class Repeat(NamedTuple):
    """A tensor that the code of a module repeats, and the result: traced names, and sizes."""

    module: str
    ends: tuple[str, str]
    sizes: tuple[Sizes, Sizes]


def repeats_of(graph: Graph, traced: Mapping[str, str] | None = None) -> Iterator[Repeat]:
    """All that `graph` has; its tensors are copies of those `traced`, if any are."""
    for op in graph.ops:
        if op.call.op == "repeat":
            one, other = op.inputs[0], op.outputs[0]
            ends = (one, other) if traced is None else (traced[one], traced[other])
            sizes = graph.tensors[one].shape, graph.tensors[other].shape
            yield Repeat(op.module, ends, sizes)


def as_planned(repeats: Iterable[Repeat], local: Mapping[str, Sizes]) -> Repeats:
    """What is noted of each on the whole, and on a part of these `local` sizes (see `calls.py`)."""
    found: dict[tuple[str, Numbers], set[Numbers]] = {}
    for module, (one, other), sizes in repeats:
        found.setdefault((module, _noted(*sizes)), set()).add(_noted(local[one], local[other]))
    return found


def _noted(before: Sizes, after: Sizes) -> Numbers:
    lengths = zip(reversed(before), reversed(after), strict=False)
    return repeated(before, [b // a if a else 0 for a, b in lengths][::-1])
