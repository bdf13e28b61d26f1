"""What is run to try a plan: the whole model, or that with the traced blocks alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from shardwright.planner.blocks.stacks import Stack, shortened
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.like_blocks import LikeBlocks
from shardwright.planner.dry_run.local_run import Mismatch, run_local
from shardwright.planner.trace.calls import Calls
from shardwright.planner.trace.on_fake import calls_of
from shardwright.planner.trace.opaque import Opaque
from shardwright.planner.trace.traced_calls import Run


@dataclass(frozen=True)
class DryRun:
    """Runs of `root`, shortened to the picked blocks of `stacks`.

    `watched` has (module, slot of its output, traced tensor) for each call of a module, in order.
    Blocks of `alike` that are alike run once, unless all are asked for.
    """

    root: nn.Module
    stacks: Sequence[Stack]
    runs: Sequence[Run]
    opaque: Opaque
    watched: Sequence[tuple[str, str, str]]
    alike: Sequence[Stack] = ()
    _whole: dict[bool, Whole] = field(default_factory=dict, init=False)

    def mismatch(
        self,
        plan: Plan,
        coords: Coords,
        sizes: Mapping[str, tuple[int, ...]],
        every_block: bool = False,
    ) -> Mismatch | None:
        """Make the runs as one rank; None if all is as `sizes`, of traced tensors, says.

        With `every_block`, no block is left out because it is like another.
        """
        whole = self.whole(every_block)
        predicted: dict[tuple[str, str], list[tuple[int, ...]]] = {}
        for module, slot, tensor in self.watched:
            predicted.setdefault((module, slot), []).append(sizes[tensor])
        with shortened(self.root, self.stacks):
            here = {name for name, _ in self.root.named_modules()}
            spoken = {n: m for n, m in plan.modules.items() if "*" in n or n in here}
            part = plan.model_copy(update={"modules": spoken}) if self.stacks else plan
            blocks = LikeBlocks(self.alike, whole.left_out)
            how = (self.opaque, whole.calls, blocks)
            found = run_local(self.root, self.runs, part, coords, predicted, *how)
        if found is not None and whole.left_out:  # what was left out may be why
            return self.mismatch(plan, coords, sizes, every_block=True)
        return found

    def whole(self, every_block: bool) -> Whole:
        """What the code of the unsplit modules does.

        (For a `cached_property` Python 3.11 holds a lock, and model code may plan, too.)
        """
        every_block = every_block or not self.alike
        if every_block not in self._whole:
            blocks = LikeBlocks(() if every_block else self.alike)
            with shortened(self.root, self.stacks):
                calls = calls_of(self.root, self.runs, self.opaque, blocks.watch)
            self._whole[every_block] = Whole(calls, frozenset(blocks.left_out), blocks.numbered)
        return self._whole[every_block]


class Whole(NamedTuple):
    """What code of unsplit modules calls, where it runs; the calls of blocks that were left out.

    And whether code of blocks asks for the number of its block.
    """

    calls: Calls | None
    left_out: frozenset[tuple[str, int]]
    numbered: bool
