"""What is to be planned: a model traced and folded, its axes, a workload, a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

from torch import nn

from shardwright.planner.blocks.fold import Folding
from shardwright.planner.blocks.unfold import Unfolded, unfold
from shardwright.planner.contract.mesh import CP, TP, Coords, coords_of
from shardwright.planner.contract.plan_figures import Workload
from shardwright.planner.dry_run.block_dedup import calls_between_blocks
from shardwright.planner.dry_run.dry_run import DryRun, repeats_of
from shardwright.planner.graph.axes import Axes
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.pins import Pin
from shardwright.planner.strategies.sequence import OpenSequence
from shardwright.planner.strategies.states import States
from shardwright.planner.strategies.sub_axes import SubAxes, find_sub_axes
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.opaque.opaque_modules import Opaque

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Task:
    """One model for one workload on one mesh, and what follows from that alone.

    Attributes:
        source: The model, and the runs that a plan must hold for.
        folding: Its graph with one block of each kind, on which all is decided.
        unfolded: The graph of all blocks, which is checked and priced.
        axes: Axes of the folded graph.
        workload: What is priced.
        mesh: Mesh dims and their ranks.
        pins: What the user wants of parameters; blocks with different pins are not folded into one.
        sequence: Where hidden states are to be split along the sequence: its axes.
        unmasked: Whether calls with a mask for padding could not be traced, though it takes one.
        along_sequence: Where nobody said whether hidden states are to be split along the sequence:
            traces the same so. Raises an InfeasibleError if it has no sequence to split.
    """

    source: Source
    folding: Folding
    unfolded: Unfolded
    axes: Axes
    workload: Workload
    mesh: Mapping[str, int]
    pins: tuple[Pin, ...] = ()
    sequence: OpenSequence | None = None
    unmasked: bool = False
    along_sequence: Callable[[], Task] | None = None

    @property
    def tp(self) -> int:
        """Ranks that one copy of the model is split over."""
        return self.mesh[TP]

    @property
    def cp(self) -> int:
        """Ranks that share each sequence."""
        return self.mesh.get(CP, 1)

    @cached_property
    def sub(self) -> SubAxes:
        """What tensors may be split over."""
        return find_sub_axes(self.graph, self.axes, self.tp, cp=self.cp)

    @property
    def graph(self) -> Graph:
        """The folded graph, on which all is decided."""
        return self.folding.graph

    @cached_property
    def untraced(self) -> Opaque:
        """The modules of the whole model that are like one that was not traced."""
        found = {n: t for n, t in self.traced_names.items() if t in self.graph.untraced}
        return self._opaque(found)

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

        But for those in which no module could do that instead: where there is none, and where what
        is made in passes of a loop of its own code, which may not be made, lies as it is.
        """
        root, graph = self.source.module, self.graph
        made = {after for _, after in graph.marks.changed_in_regions}
        looping = {op.module for op in graph.ops if not made.isdisjoint(op.outputs)}
        alone = {run.module for run in self.source.runs} - looping
        return frozenset(n for n in alone if any(True for _ in root.get_submodule(n).children()))

    @cached_property
    def unfolded_states(self) -> States:
        """Axes and domains of the unfolded graph, nothing forbidden: for checking and pricing."""
        sequence = self.sequence and self.sequence.unfolded(self.unfolded.origin, self.traced_names)
        return self._states(self.unfolded, sequence)

    @cached_property
    def short(self) -> tuple[Unfolded, States]:
        """A graph with no more than three copies of a block in a row, for what passes."""
        short = unfold(self.folding, alike=3)
        return short, self._states(short, self.sequence)

    @cached_property
    def dry_runs(self) -> list[DryRun]:
        """The whole model; and for further calls, that with the traced blocks alone."""
        root, runs, stacks = self.source.module, self.source.runs, self.folding.stacks
        brief = len(self.source.further) if stacks else 0
        origin = self.unfolded.origin
        watched = [(m, slot, origin[t]) for m, slot, t in self.unfolded.graph.watched]
        again = [*repeats_of(self.unfolded.graph, origin)]
        full = DryRun(root, (), runs[: len(runs) - brief], self.untraced, watched, stacks, again)
        if not stacks:
            return [full]
        opaque = self._opaque({n: n for n in self.graph.untraced})
        again = [*repeats_of(self.graph)]
        return [full, DryRun(root, stacks, runs, opaque, self.graph.watched, (), again)]

    @property
    def numbered(self) -> bool:
        """Whether what is done in or between folded blocks depends on which of them they are."""
        stacks = self.folding.stacks
        if not stacks:
            return False
        full, brief = (run.unsharded(every_block=False) for run in self.dry_runs)
        if full.numbered or brief.calls is None:
            return full.numbered
        # Where numbers that note questions are in the way of code, it does more than hand them on.
        return full.calls is None or not (
            calls_between_blocks(full.calls, stacks) <= calls_between_blocks(brief.calls, stacks)
        )

    def _opaque(self, alike: Mapping[str, str]) -> Opaque:
        """The modules that are not traced, and how data was asked for in the trace."""
        graph = self.graph
        how = graph.stand_ins, graph.branch_paths, graph.skips
        return Opaque(self.source.module, alike, *how)

    def ranks(self, states: States) -> list[Coords]:
        """Where each rank stands, on the sub-axes of tp too; the last mesh dim varies fastest."""
        table = states.sub.table()
        return [coords_of(self.mesh, table, rank) for rank in range(prod(self.mesh.values()))]

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
        return States(graph, copied, self.tp, lookups, sequence=sequence, sub=self.sub)


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
