"""Finds the sets of axes of a dim that may be sharded together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.planner.graph.axes import ATOM, CONCAT, PRODUCT, Dim, atoms_of, find

MAX_CUTS = 64
"""Ways to split some parts of a concatenation: those of 6 different parts."""


def cuts(dim: Dim, allowed: frozenset[int]) -> list[frozenset[int]]:
    """Return the ways to split `dim` once: sets of atom ids, at most one per concatenated part.

    Of a concatenation of many parts, all parts that may be split are split, or none.
    """
    dim = find(dim)
    if dim.kind == ATOM:
        return [frozenset({dim.id})] if dim.id in allowed else []
    if dim.kind == PRODUCT:
        out = [c for factor in dim.children for c in cuts(factor, allowed)]
        return [c for c in dict.fromkeys(out) if _fits(dim, c)]
    parts = [cuts(term, allowed) for term in dim.children]
    some = _joined([[frozenset(), *options] for options in parts])
    found = some or _joined([options for options in parts if options])
    return [c for c in found if c and _fits(dim, c)]


def _joined(parts: Sequence[Sequence[frozenset[int]]]) -> list[frozenset[int]]:
    """Return each union of one option per part; none if there are too many."""
    found = [frozenset[int]()]
    for options in parts:
        found = list(dict.fromkeys(p | o for p in found for o in options))
        if len(found) > MAX_CUTS:
            return []
    return found


def cut_at_run_time(dim: Dim) -> set[int]:
    """Return the atoms of the concatenations in `dim` that have a part of run-time size.

    The first axis of a part counts: an input may be multiplied with the channels of heads.
    """
    dim = find(dim)
    if dim.kind == ATOM:
        return set()
    if dim.kind == CONCAT and any(a.unshardable for c in dim.children for a in atoms_of(c)[:1]):
        return {a.id for a in atoms_of(dim)}
    return set().union(*(cut_at_run_time(c) for c in dim.children))


def _fits(dim: Dim, cut: frozenset[int]) -> bool:
    """Whether splitting every atom of `cut` at all its positions splits no element twice."""
    return _depth(dim, cut) <= 1


def _depth(dim: Dim, cut: frozenset[int]) -> int:
    dim = find(dim)
    if dim.kind == ATOM:
        return int(dim.id in cut)
    depths = [_depth(c, cut) for c in dim.children]
    return sum(depths) if dim.kind == PRODUCT else max(depths, default=0)


def covers(dim: Dim, cut: Iterable[int]) -> bool:
    """Whether every element of `dim` is split by `cut`."""
    dim, cut = find(dim), frozenset(cut)
    if dim.kind == ATOM:
        return dim.id in cut
    test = any if dim.kind == PRODUCT else all
    return test(covers(c, cut) for c in dim.children)
