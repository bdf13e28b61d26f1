"""Find the dims that count the keys of attention, and the tensors that a KV cache holds.

In the trace, queries and keys are one sequence and share an axis. In decoding there is one query
and one key per token so far. Two places tell them apart: scaled dot product attention names its
keys, and a tensor with two dims of that axis is a table of scores whose later dim counts keys. An
operand of such an op with a key axis but no query axis holds values of earlier tokens: it comes
from a cache. The cache holds it before it is repeated over groups of heads, so the cached tensor is
the smallest one on the way back over views and copies.

This is an approximation. A sliding window is not recognized: its cache is counted at full length.
For a cache of latents, the keys and values computed from the latents are counted. States of
recurrences are not counted at all. The encoder of an encoder-decoder model is counted as if it
had a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import networkx as nx

from shardwright.planner.contract.names import made_once
from shardwright.planner.graph.as_networkx import sources
from shardwright.planner.graph.axes import Axes, Dim, find, leaves_of
from shardwright.planner.graph.graph import Graph, once_a_graph
from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_ROWS, TRACE_SEQ, TRACE_SOURCE
from shardwright.planner.graph.views import moved
from shardwright.rules.notation import letters

ATTENTION = frozenset({"scaled_dot_product_attention", "shardwright::attention_rows"})


@dataclass(eq=False)
class Keys:
    """The dims and tensors of a graph that depend on the lengths of a workload.

    Attributes:
        run_time: Id of a dim of run-time size -> "batch", "seq", or "rows" for their product.
        letters: Op name -> letters of its rule that count keys.
        cached: The tensors that a KV cache holds.
    """

    run_time: Mapping[int, str]
    letters: dict[str, frozenset[str]] = field(default_factory=dict)
    cached: list[str] = field(default_factory=list)
    _counts: dict[int, bool] = field(default_factory=dict)

    def counts_tokens(self, dim: Dim) -> bool:
        """Return whether the length of a dim depends on the sequence length."""
        found = find(dim)

        def counts() -> bool:
            return any(self.run_time.get(d.id) == "seq" for d in (found, *leaves_of(found)))

        return made_once(self._counts, found.id, counts)

    def unfolded(self, origin: Mapping[str, str]) -> Keys:
        """Return the keys of an unfolded graph; `origin` maps its names to names of this graph."""
        cached = set(self.cached)
        return replace(
            self,
            letters={copy: self.letters[n] for copy, n in origin.items() if n in self.letters},
            cached=[copy for copy, n in origin.items() if n in cached],
        )

    def within(self, graph: Graph) -> Keys:
        """Return the keys of `graph`, a part of the original graph."""
        ops = {op.name for op in graph.ops}
        return replace(
            self,
            letters={n: x for n, x in self.letters.items() if n in ops},
            cached=[n for n in self.cached if n in graph.tensors],
        )


def last_of_two(dims: Sequence[Dim], counts: Callable[[Dim], bool]) -> frozenset[int]:
    """Return the dim of a table of scores that counts keys: the last of two or more token dims.

    `counts` says which dims count tokens. The set is empty for other tensors.
    """
    found = [i for i, dim in enumerate(dims) if counts(dim)]
    return frozenset(found[-1:] if len(found) > 1 else ())


def run_time_dims(graph: Graph, axes: Axes) -> dict[int, str]:
    """Return the dims of run-time size -> "batch", "seq", or "rows" for their product.

    A dim that a parameter has too (3 colours of an image) is not a batch, whatever its size, and
    neither are its parts.
    """
    words = {TRACE_BATCH: "batch", TRACE_SEQ: "seq", TRACE_SOURCE: "seq", **graph.lengths}
    known = {find(d).id for use in graph.uses for d in axes.dims[use.stored]}
    given = (find(d) for name in graph.inputs for d in axes.dims[name])
    dims = [d for d in given if d.id not in known]
    dims += [a for d in dims for a in leaves_of(d)]
    out = {d.id: words[d.size] for d in dims if d.size in words and d.id not in known}
    rows = {find(axes.dims[n][k]) for n, k in graph.marks.fixed}
    return out | {d.id: "rows" for d in rows if d.size == TRACE_ROWS and d.id not in known}


@once_a_graph
def find_keys(graph: Graph, axes: Axes) -> Keys:
    """Find the keys and cached tensors of a graph."""
    out, moves = Keys(run_time_dims(graph, axes)), sources(graph, moved)
    counts = out.counts_tokens
    for op in graph.ops:
        sides = axes.sides(op)
        keys = {"k"} if sides and op.call.op in ATTENTION else set[str]()
        queries: set[str] = set()
        for name, exprs in sides:
            last = last_of_two(axes.dims[name], counts)
            for i, expr in enumerate(exprs):
                (keys if i in last else queries).update(letters(expr))
        keys &= {x for x in keys if counts(axes.rule_axes[op.name][x])}
        if not keys:
            continue
        out.letters[op.name] = frozenset(keys)
        asked = {x for x in queries - keys if counts(axes.rule_axes[op.name][x])}
        for name, exprs in sides[: len(op.inputs)]:
            has = {x for expr in exprs for x in letters(expr)}
            cached = has & keys and not has & asked and graph.tensors[name].differentiable
            if cached and graph.priced(op):
                _trace_back(name, graph, axes, moves, out)
    out.cached = list(dict.fromkeys(out.cached))
    return out


def _trace_back(name: str, graph: Graph, axes: Axes, moves: nx.DiGraph, out: Keys) -> None:
    """Follow an attention operand back to where it was computed.

    Adds the letters of the ops on the way and the cached tensor to `out`.
    """
    way = [*nx.dfs_edges(moves, name)]
    for op in (moves[after][before]["op"] for after, before in way):
        if op is not None:
            found = axes.rule_axes.get(op.name, {}).items()
            out.letters[op.name] = frozenset(x for x, d in found if out.counts_tokens(d))
    names = [name, *(before for _, before in way)]
    out.cached.append(min(names, key=lambda n: prod(graph.tensors[n].shape)))
