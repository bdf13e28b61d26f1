"""What is to be planned: a model traced and folded, its axes, a workload, a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

from torch import nn

from shardwright.planner.blocks.fold import Folding
from shardwright.planner.blocks.unfold import Unfolded, unfold
from shardwright.planner.contract.mesh import TP, Coords, coords_of
from shardwright.planner.contract.plan_file import Memory, Workload
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.memory import memory as measure
from shardwright.planner.emit import Layouts
from shardwright.planner.graph.axes import Axes
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.builder import CostFunctionNetwork
from shardwright.planner.problem.pins import Pin
from shardwright.planner.strategies.sequence import OpenSequence
from shardwright.planner.strategies.states import States
from shardwright.planner.strategies.sub_axes import find_sub_axes
from shardwright.planner.trace.opaque import Opaque
from shardwright.planner.trace.source import Source
from shardwright.planner.verify.first_run import of_first_run
from shardwright.planner.verify.recost import Bill

T = TypeVar("T")


@dataclass
class Task:
    """One model for one workload on one mesh, and what follows from that alone."""

    source: Source
    folding: Folding
    whole: Unfolded
    axes: Axes
    workload: Workload
    mesh: Mapping[str, int]
    pins: tuple[Pin, ...] = ()
    sequence: OpenSequence | None = None

    @property
    def tp(self) -> int:
        """Ranks that one copy of the model is split over."""
        return self.mesh[TP]

    @property
    def graph(self) -> Graph:
        """The folded graph, on which all is decided."""
        return self.folding.graph

    @cached_property
    def untraced(self) -> Opaque:
        """The modules of the whole model that are like one that was not traced."""
        found = {n: t for n, t in self.traced_names.items() if t in self.graph.untraced}
        return Opaque(self.source.module, found, self.graph.stand_ins, self.graph.branch_paths)

    @cached_property
    def traced_names(self) -> dict[str, str]:
        """Module of the whole model -> the traced one that stands for it."""
        names = (n for n, _ in self.source.module.named_modules())
        return {n: self.folding.traced_name(n) for n in names}

    @cached_property
    def caches(self) -> bool:
        """Whether the model generates tokens, and keeps keys and values for that."""
        return bool(getattr(self.source.module, "can_generate", bool)())

    @cached_property
    def lookups(self) -> frozenset[str]:
        """Lookups that the runtime can replace."""
        return replaceable(self.graph, self.source.module)

    @cached_property
    def rigid(self) -> frozenset[str]:
        """Modules at whose boundaries nothing may change: those that run by themselves.

        A sole module is the exception: it has no modules within that could change a tensor.
        """
        root = self.source.module
        alone = {run.module for run in self.source.runs}
        return frozenset(n for n in alone if any(True for _ in root.get_submodule(n).children()))

    def ranks(self, states: States) -> list[Coords]:
        """Where each rank stands, on the sub-axes of tp too; the last mesh dim varies fastest."""
        table = states.sub.table()
        return [coords_of(self.mesh, table, rank) for rank in range(prod(self.mesh.values()))]

    def costs_of(self, unfolded: Unfolded, states: States, folded: Costs) -> Costs:
        """Prices of an unfolded graph."""
        sent = frozenset(copy for copy, n in unfolded.origin.items() if n in folded.gathered)
        out = Costs(unfolded.graph, states.axes, states, self.workload, self.caches, sent)
        out.keys = folded.keys.unfolded(unfolded.origin)
        return out

    def held(self, costs: Costs, network: CostFunctionNetwork, values: Sequence[int]) -> Memory:
        """Bytes that a rank of the whole model holds."""
        layouts = Layouts(self.graph, costs.states, network.assignment(tuple(values)))
        whole = self.unfolded(layouts)
        prices = self.costs_of(self.whole, whole.states, costs)
        return self.memory_of(Bill(prices, whole.assignment), layouts, costs)

    def memory_of(self, bill: Bill, layouts: Layouts, folded: Costs) -> Memory:
        """Bytes that a rank holds in the first run, given the bill of the whole model."""
        short, states = self._short
        prices = self.costs_of(short, states, folded)
        first = of_first_run(bill)
        passing = of_first_run(Bill(prices, of_copies(layouts.assignment, short)))
        return measure(first.costs, first.assignment, (passing.costs, passing.assignment))

    def unfolded(self, layouts: Layouts) -> Layouts:
        """The same plan on the whole graph."""
        if self.whole.graph is self.graph:
            return layouts
        return Layouts(
            self.whole.graph, self._whole_states, of_copies(layouts.assignment, self.whole)
        )

    @cached_property
    def _whole_states(self) -> States:
        """Axes and domains of the whole graph, with nothing forbidden: for checking and pricing."""
        sequence = self.sequence and self.sequence.unfolded(self.whole.origin, self.traced_names)
        return self._states(self.whole, sequence)

    @cached_property
    def _short(self) -> tuple[Unfolded, States]:
        """A graph with no more than three copies of a block in a row, for what passes."""
        short = unfold(self.folding, alike=3)
        return short, self._states(short, self.sequence)

    def _states(self, unfolded: Unfolded, sequence: OpenSequence | None) -> States:
        """Axes and domains of an unfolded graph."""
        graph, origin, axes = unfolded.graph, unfolded.origin, self.axes
        ops = {op.name: origin[op.name] for op in graph.ops}
        copied = Axes(
            dims=of_copies(axes.dims, unfolded),
            axes={copy: axes.axes[op] for copy, op in ops.items() if op in axes.axes},
            rules={copy: axes.rules[op] for copy, op in ops.items()},
            conflicts=axes.conflicts,
        )
        lookups = frozenset(copy for copy, op in ops.items() if op in self.lookups)
        sub = find_sub_axes(self.graph, axes, self.tp)
        return States(graph, copied, self.tp, lookups, sequence=sequence, sub=sub)


def of_copies(values: Mapping[str, T], unfolded: Unfolded) -> dict[str, T]:
    """The values of the copies of tensors."""
    names = unfolded.graph.tensors
    found = map(values.__getitem__, map(unfolded.origin.__getitem__, names))
    return dict(zip(names, found, strict=True))


def replaceable(graph: Graph, root: nn.Module) -> frozenset[str]:
    """Lookups of an `nn.Embedding` in its own weight: those the runtime can replace."""
    owned = {u.used: u.fqn for u in graph.uses}
    return frozenset(
        op.name
        for op in graph.ops
        if op.call.op == "embedding"
        and owned.get(op.inputs[0]) == f"{op.module}.weight".lstrip(".")
        and isinstance(root.get_submodule(op.module), nn.Embedding)
    )
