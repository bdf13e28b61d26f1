"""The dry runs of a traced model: which parts of it run, on which calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.planner.blocks.unfold import Unfolded
from shardwright.planner.dry_run.block_dedup import calls_between_blocks
from shardwright.planner.dry_run.dry_run import DryRun, repeats_of
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.opaque.opaque_modules import Opaque


@dataclass(frozen=True, eq=False)
class DryRuns:
    """The dry runs of a model, and what they show of its blocks.

    Attributes:
        source: The model, and its runs.
        unfolded: The graph of all blocks, with the folded one.
    """

    source: Source
    unfolded: Unfolded

    @cached_property
    def traced_names(self) -> dict[str, str]:
        """Module of the full model -> the traced module that represents it."""
        names = (n for n, _ in self.source.module.named_modules())
        return {n: self.unfolded.folding.traced_name(n) for n in names}

    @cached_property
    def each(self) -> list[DryRun]:
        """The dry runs: the full model, and with folded blocks the traced blocks for all runs."""
        folding = self.unfolded.folding
        root, runs, stacks = self.source.module, self.source.runs, folding.stacks
        brief, untraced = len(self.source.further) if stacks else 0, folding.graph.untraced
        origin = self.unfolded.origin
        watched = [(m, slot, origin[t]) for m, slot, t in self.unfolded.graph.watched]
        again = [*repeats_of(self.unfolded.graph, origin)]
        opaque = self._opaque({n: t for n, t in self.traced_names.items() if t in untraced})
        full = DryRun(root, (), runs[: len(runs) - brief], opaque, watched, stacks, again)
        if not stacks:
            return [full]
        opaque = self._opaque({n: n for n in untraced})
        again = [*repeats_of(folding.graph)]
        return [full, DryRun(root, stacks, runs, opaque, folding.graph.watched, (), again)]

    @property
    def numbered(self) -> bool:
        """Whether the code in or between folded blocks depends on the index of a block."""
        stacks = self.unfolded.folding.stacks
        if not stacks:
            return False
        full, brief = (run.unsharded(every_block=False) for run in self.each)
        if full.numbered or brief.calls is None:
            return full.numbered
        # No calls: the code failed on index objects that record reads, so it computes with them.
        return full.calls is None or not (
            calls_between_blocks(full.calls, stacks) <= calls_between_blocks(brief.calls, stacks)
        )

    def _opaque(self, alike: Mapping[str, str]) -> Opaque:
        """The modules that are not traced, with the data queries of the trace."""
        graph = self.unfolded.folding.graph
        how = graph.stand_ins, graph.branch_paths, graph.skips
        return Opaque(self.source.module, alike, *how)
