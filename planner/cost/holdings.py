"""Bytes that a rank holds of each tensor, independent of other tensors, so the solver can add them.

These are parameters and buffers; for training also their gradients, the optimizer's state, and the
activations that autograd keeps; for generation also the KV cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.planner.contract.plan_figures import Workload
from shardwright.planner.cost.phases import Pass, own_batch
from shardwright.planner.cost.recomputation import Recomputation
from shardwright.planner.cost.redistribution_costs import edges
from shardwright.planner.cost.tensor_sizes import TensorSizes
from shardwright.planner.graph.graph import Graph, once_a_graph
from shardwright.planner.graph.views import is_view
from shardwright.planner.strategies.state import State


@dataclass(frozen=True)
class Holdings:
    """The bytes held of each tensor of a graph, independent of other tensors."""

    graph: Graph
    sizes: TensorSizes
    workload: Workload
    caches: bool
    recomputation: Recomputation
    copies: Mapping[str, int] | None = None
    """In a folded graph: activation -> how many of its copies autograd keeps."""

    @cached_property
    def full(self) -> Pass:
        """A pass of one copy of the model over all its tokens, independent of the phase."""
        seq = self.workload.seq
        return Pass("prefill", 1, own_batch(self.workload), seq, seq)

    @cached_property
    def trains(self) -> bool:
        """Whether any pass trains, so there are gradients."""
        return any(run.trains for run in self.sizes.passes)

    @cached_property
    def stored(self) -> dict[str, bool]:
        """Parameters and buffers, each with whether it is trained."""
        graph = self.graph
        return {u.stored: graph.tensors[u.stored].differentiable for u in graph.uses}

    @cached_property
    def given(self) -> frozenset[str]:
        """Parameters, buffers and inputs: all that is there before a pass, and no activation."""
        return given(self.graph)

    @cached_property
    def cached(self) -> frozenset[str]:
        """Keys and values in the KV cache."""
        generates = not all(run.trains for run in self.sizes.passes)
        return frozenset(self.sizes.keys.cached if generates and self.caches else ())

    @cached_property
    def kept(self) -> frozenset[str]:
        """Activations that autograd keeps."""
        if not self.trains:
            return frozenset()
        if self.copies is not None:
            return frozenset(self.copies)
        return kept_activations(self.graph, self.recomputation)

    @cached_property
    def names(self) -> list[str]:
        """All tensors that take memory, in a fixed order."""
        return [n for n in self.graph.tensors if n in self.stored or n in self.others]

    @cached_property
    def others(self) -> frozenset[str]:
        """Tensors that take memory and are not parameters or buffers."""
        return self.cached | self.kept

    def bytes(self, name: str, state: State) -> int:
        """Return the bytes held of all copies of `name` in `state`, on the rank that holds most."""
        times = self.graph.times(name)
        if name in self.stored:
            return times * (self.sizes.at_rest(name, state) + sum(self.training(name, state)))
        kept = times if self.copies is None else self.copies.get(name, 0)
        held = times * (name in self.cached) + kept * (name in self.kept)
        return held * self.sizes.bytes(name, state, self.full)

    def training(self, name: str, state: State) -> tuple[int, int]:
        """Return the bytes of a parameter's gradient and of its optimizer state."""
        if not (self.trains and self.stored[name]) or self.graph.tensors[name].bits is not None:
            return 0, 0  # quantized parameters are frozen
        size = self.sizes.at_rest(name, state)
        elements = size // self.graph.tensors[name].dtype.itemsize
        return size, elements * self.workload.optimizer_bytes


@once_a_graph
def given(graph: Graph) -> frozenset[str]:
    """Return the parameters, buffers and inputs of a graph."""
    return frozenset((*(use.stored for use in graph.uses), *graph.inputs))


@once_a_graph
def kept_activations(graph: Graph, recomputation: Recomputation) -> frozenset[str]:
    """Return the activations that autograd keeps, each by the tensor whose memory it uses."""
    base = storages(graph, ((start, end) for _, start, end in edges(graph)))
    return frozenset(base[n] for n in recomputation.kept) - given(graph)


def storages(graph: Graph, passed: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return tensor -> the tensor whose memory it uses; itself, if it has memory of its own.

    Args:
        graph: The graph.
        passed: (source, target) of the redistributions without a collective.
    """
    source = {end: start for start, end in passed}
    calls = {id(op.call): op.call for op in graph.ops}  # copies of an op share the call
    views = {at for at, call in calls.items() if is_view(call)}
    source |= {out: op.inputs[0] for op in graph.ops if id(op.call) in views for out in op.outputs}
    base: dict[str, str] = {}
    for name in graph.tensors:
        chain = [name]
        while (at := source.get(chain[-1])) is not None and at not in base:
            chain.append(at)
        root = chain[-1] if at is None else base[at]
        for each in chain:
            base[each] = root
    return base
