"""`Task`: a traced and folded model with its axes, workload and mesh, ready to be planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TypeVar

from torch import nn

from shardwright.planner.blocks.fold import Folding
from shardwright.planner.blocks.unfold import Unfolded
from shardwright.planner.contract.mesh import CP, TP, Coords, coords_of
from shardwright.planner.contract.names import is_within
from shardwright.planner.contract.plan_figures import Workload
from shardwright.planner.cost.holdings import kept_activations
from shardwright.planner.cost.recomputation import recomputation
from shardwright.planner.graph.axes import Axes
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.pins import Pin
from shardwright.planner.search.dry_runs import DryRuns
from shardwright.planner.strategies.sequence import OpenSequence
from shardwright.planner.strategies.states import States
from shardwright.planner.strategies.sub_axes import SubAxes, find_sub_axes
from shardwright.planner.trace.model.source import Source
from shardwright.runtime.modules.recomputation import recomputable

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Task:
    """One model for one workload on one mesh, and everything that follows from these.

    Attributes:
        source: The model, and the runs that a plan must hold for.
        unfolded: The graph of all blocks, which is checked and priced, with the folded one.
        axes: Axes of the folded graph.
        workload: The priced workload.
        mesh: Mesh dims and their ranks.
        pins: The user's pins. Blocks with different pins are not folded into one.
        sequence: The sequence axes, if hidden states are to be sharded along the sequence.
        unmasked: Whether the model takes a padding mask but calls with one could not be traced.
        along_sequence: Traces the model for sequence parallelism, if the user left that open.
            Raises an InfeasibleError if the model has no sequence to shard.
        recomputing: Returns the task with fewer blocks computed again in the backward pass than in
            this one; None if that is not a choice.
    """

    source: Source
    unfolded: Unfolded
    axes: Axes
    workload: Workload
    mesh: Mapping[str, int]
    pins: tuple[Pin, ...] = ()
    sequence: OpenSequence | None = None
    unmasked: bool = False
    along_sequence: Callable[[], Task] | None = None
    recomputing: Callable[[Mapping[str, int]], Task] | None = None

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks of one copy of the model."""
        return self.mesh[TP]

    @property
    def cp(self) -> int:
        """Ranks that share each sequence."""
        return self.mesh.get(CP, 1)

    @cached_property
    def sub(self) -> SubAxes:
        """The sub-axes of the mesh that tensors may be sharded over."""
        found = find_sub_axes(
            self.graph, self.axes, self.tp, cp=self.cp, weights=self.workload.shares
        )
        return replace(found, ep=self.workload.spread)

    @property
    def folding(self) -> Folding:
        """The graph with one block of each kind, and its stacks."""
        return self.unfolded.folding

    @property
    def graph(self) -> Graph:
        """The folded graph, which the solver decides on."""
        return self.folding.graph

    @cached_property
    def dry(self) -> DryRuns:
        """The dry runs of the model."""
        return DryRuns(self.source, self.unfolded)

    @property
    def traced_names(self) -> Mapping[str, str]:
        """Module of the full model -> the traced module that represents it."""
        return self.dry.traced_names

    @cached_property
    def recomputable(self) -> dict[str, int]:
        """Lists of blocks that can be computed again in the backward pass, with their lengths."""
        found = {path: len(blocks) for path, blocks in recomputable(self.source.module).items()}
        return {path: n for path, n in found.items() if not self.stateful(path)}

    def stateful(self, path: str) -> list[str]:
        """Return the modules in a list of blocks that may do something else if they run again."""
        named = (n for n in self.traced_names if is_within(n, path))
        return [n for n in named if self.traced_names[n] in self.graph.stateful]

    @cached_property
    def caches(self) -> bool:
        """Whether the model generates tokens, and so has a KV cache."""
        return bool(getattr(self.source.module, "can_generate", bool)())

    @cached_property
    def lookups(self) -> frozenset[str]:
        """Names of the embedding lookups that the runtime can replace."""
        return replaceable(self.graph, self.source.module)

    @cached_property
    def rigid(self) -> frozenset[str]:
        """Modules at whose boundaries no tensor may be redistributed: the roots of the runs.

        Others are modules with a forward of their own on the instance, as compiled ones, which the
        runtime cannot replace. Not included are roots without submodules, and roots whose own code
        changes tensors in loop passes that may not run: no submodule could redistribute these.
        """
        root, graph = self.source.module, self.graph
        made = {after for _, after in graph.marks.changed_in_regions}
        looping = {op.module for op in graph.ops if not made.isdisjoint(op.outputs)}
        alone = {run.module for run in self.source.runs} - looping
        alone |= {n for n, module in root.named_modules() if "forward" in vars(module)}
        return frozenset(n for n in alone if any(True for _ in root.get_submodule(n).children()))

    @cached_property
    def unfolded_states(self) -> States:
        """Axes and domains of the unfolded graph for the check and the prices. Forbids no split."""
        sequence = self.sequence and self.sequence.unfolded(self.unfolded.origin, self.traced_names)
        return self._states(self.unfolded, sequence)

    @cached_property
    def short(self) -> tuple[Unfolded, States]:
        """A graph with at most three copies of a block in a row, for the peak of activations."""
        short = self.unfolded.short
        return short, self._states(short, self.sequence)

    @cached_property
    def kept_copies(self) -> Mapping[str, int] | None:
        """Activation of the folded graph -> how many copies autograd keeps.

        None if the graph is not folded, or nothing trains.
        """
        if self.unfolded.graph is self.graph or "train" not in self.workload.phases:
            return None
        graph, origin = self.unfolded.graph, self.unfolded.origin
        kept = kept_activations(graph, recomputation(graph, self.workload.recomputed))
        return Counter(origin[name] for name in kept)

    def ranks(self, states: States) -> list[Coords]:
        """Coordinates of each rank on mesh dims and sub-axes. The last mesh dim varies fastest."""
        table = states.sub.table()
        return [coords_of(self.mesh, table, rank) for rank in range(prod(self.mesh.values()))]

    def _states(self, unfolded: Unfolded, sequence: OpenSequence | None) -> States:
        """Axes and domains of an unfolded graph."""
        graph, origin, axes = unfolded.graph, unfolded.origin, self.axes
        ops = {op.name: origin[op.name] for op in graph.ops}
        copied = Axes(
            dims=of_copies(axes.dims, unfolded),
            rule_axes={
                copy: axes.rule_axes[op] for copy, op in ops.items() if op in axes.rule_axes
            },
            rules={copy: axes.rules[op] for copy, op in ops.items()},
            conflicts=axes.conflicts,
        )
        lookups = frozenset(copy for copy, op in ops.items() if op in self.lookups)
        return States(graph, copied, self.tp, lookups, sequence=sequence, sub=self.sub)


def of_copies(values: Mapping[str, T], unfolded: Unfolded) -> dict[str, T]:
    """Map values of the folded graph's tensors to their copies in an unfolded graph."""
    origin = unfolded.origin
    return {copy: values[n] for copy in unfolded.graph.tensors if (n := origin[copy]) in values}


def replaceable(graph: Graph, root: nn.Module) -> frozenset[str]:
    """Return the lookups of an `nn.Embedding` in its own weight: the runtime can replace these."""
    owned = {u.used: u.fqn for u in graph.uses}
    return frozenset(
        op.name
        for op in graph.ops
        if op.call.op == "embedding"
        and owned.get(op.inputs[0]) == f"{op.module}.weight".lstrip(".")
        and isinstance(root.get_submodule(op.module), nn.Embedding)
    )
