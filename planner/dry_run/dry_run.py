"""`DryRun`: dry runs of a plan, with all blocks of the model or with the traced blocks alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from shardwright.planner.blocks.stacks import Stack, shortened
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.names import grouped
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.block_dedup import DeduplicatedBlocks, duplicate_blocks
from shardwright.planner.dry_run.local_run import Mismatch, run_local
from shardwright.planner.graph.graph import Graph
from shardwright.planner.trace.model.skeletons import Hollow
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.trial.call_log import Calls, Numbers, Repeats, repeated
from shardwright.planner.trace.trial.fake_tensor_bridge import calls_of

Sizes = Sequence[int]


class Repeat(NamedTuple):
    """A repeat of a tensor in a module's code: traced names of operand and result, and sizes."""

    module: str
    ends: tuple[str, str]
    sizes: tuple[Sizes, Sizes]


@dataclass(frozen=True)
class DryRun:
    """Runs of `root`, shortened to the traced blocks of `stacks`.

    `watched` has (module, slot of its output, traced tensor) for each call of a module, in order.
    Equal blocks of the stacks `alike` run once, unless every block is requested.
    """

    root: nn.Module
    stacks: Sequence[Stack]
    runs: Sequence[Run]
    opaque: Opaque
    watched: Sequence[tuple[str, str, str]]
    alike: Sequence[Stack] = ()
    repeats: Sequence[Repeat] = ()
    _unsharded: dict[bool, UnshardedRun] = field(default_factory=dict, init=False)

    def mismatch(
        self,
        plan: Plan,
        coords: Coords,
        sizes: Mapping[str, tuple[int, ...]],
        every_block: bool = False,
    ) -> Mismatch | None:
        """Make the runs as one rank, and compare shapes with `sizes` of traced tensors.

        Args:
            plan: The plan.
            coords: Coordinates of the rank.
            sizes: Local sizes of traced tensors.
            every_block: Whether to run every block, also those that equal another.

        Returns:
            The first mismatch, or None.
        """
        whole = self.unsharded(every_block)
        predicted = grouped(((m, slot), sizes[tensor]) for m, slot, tensor in self.watched)
        with shortened(self.root, self.stacks):
            hollow = whole.hollow if whole.left_out else {}
            here = {n for n, _ in self.root.named_modules({*hollow.values()})} | hollow.keys()
            spoken = {n: m for n, m in plan.modules.items() if "*" in n or n in here}
            part = plan.model_copy(update={"modules": spoken}) if self.stacks or hollow else plan
            blocks = DeduplicatedBlocks(self.alike, whole.left_out, Hollow(hollow.values()))
            how = (self.opaque, expected_repeats(self.repeats, sizes), whole.calls, blocks)
            found = run_local(self.root, self.runs, part, coords, predicted, *how)
        wrong = found is not None or blocks.hollow.asked
        if wrong and whole.left_out:  # leaving calls out may be the cause
            return self.mismatch(plan, coords, sizes, every_block=True)
        return found

    def unsharded(self, every_block: bool) -> UnshardedRun:
        """Return the record of the unsharded model's run; it is made once.

        This is not a `cached_property`: Python 3.11 would hold a lock, and model code may plan too.
        """
        every_block = every_block or not self.alike
        if every_block not in self._unsharded:
            like = duplicate_blocks(self.root, () if every_block else self.alike)
            found = self._run(every_block, like) or self._run(every_block, {})
            assert found is not None, "nothing was hollow"
            self._unsharded[every_block] = found
        return self._unsharded[every_block]

    def _run(self, every_block: bool, hollow: Mapping[str, nn.Module]) -> UnshardedRun | None:
        """Run the unsharded model; return None if code needs the contents of `hollow` blocks."""
        blocks = DeduplicatedBlocks(
            () if every_block else self.alike, hollow=Hollow(hollow.values())
        )
        with shortened(self.root, self.stacks):
            calls = calls_of(self.root, self.runs, self.opaque, blocks.watch, blocks.hollow)
        if blocks.hollow.asked or (hollow and calls is None):
            return None
        return UnshardedRun(calls, frozenset(blocks.left_out), blocks.numbered, hollow)


class UnshardedRun(NamedTuple):
    """The record of a run of the unsharded model.

    Attributes:
        calls: The calls that its code makes; None if it does not run.
        left_out: Calls of blocks that were left out.
        numbered: Whether code reads the index of a block.
        hollow: Blocks whose contents are not needed.
    """

    calls: Calls | None
    left_out: frozenset[tuple[str, int]]
    numbered: bool
    hollow: Mapping[str, nn.Module]


def repeats_of(graph: Graph, traced: Mapping[str, str] | None = None) -> Iterator[Repeat]:
    """Yield the repeats of `graph`; `traced` maps its tensors to the traced ones, if any."""
    for op in graph.ops:
        if op.call.op == "repeat":
            one, other = op.inputs[0], op.outputs[0]
            ends = (one, other) if traced is None else (traced[one], traced[other])
            sizes = graph.tensors[one].shape, graph.tensors[other].shape
            yield Repeat(op.module, ends, sizes)


def expected_repeats(repeats: Iterable[Repeat], local: Mapping[str, Sizes]) -> Repeats:
    """Return what `call_log.py` records of each repeat, unsharded and with `local` sizes."""
    return grouped(
        ((module, _noted(*sizes)), _noted(local[one], local[other]))
        for module, (one, other), sizes in repeats
    )


def _noted(before: Sizes, after: Sizes) -> Numbers:
    lengths = zip(reversed(before), reversed(after), strict=False)
    return repeated(before, [b // a if a else 0 for a, b in lengths][::-1])
