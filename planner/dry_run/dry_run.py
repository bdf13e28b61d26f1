"""What is run to try a plan: the whole model, or that with the traced blocks alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from shardwright.planner.blocks.stacks import Stack, shortened
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.like_blocks import LikeBlocks, like_earlier
from shardwright.planner.dry_run.local_run import Mismatch, run_local
from shardwright.planner.dry_run.repeats import Repeat, as_planned
from shardwright.planner.trace.model.skeletons import Hollow
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.trial.call_log import Calls
from shardwright.planner.trace.trial.fake_tensor_bridge import calls_of


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
    repeats: Sequence[Repeat] = ()
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
            hollow = whole.hollow if whole.left_out else {}
            here = {n for n, _ in self.root.named_modules({*hollow.values()})} | hollow.keys()
            spoken = {n: m for n, m in plan.modules.items() if "*" in n or n in here}
            part = plan.model_copy(update={"modules": spoken}) if self.stacks or hollow else plan
            blocks = LikeBlocks(self.alike, whole.left_out, Hollow(hollow.values()))
            how = (self.opaque, as_planned(self.repeats, sizes), whole.calls, blocks)
            found = run_local(self.root, self.runs, part, coords, predicted, *how)
        wrong = found is not None or blocks.hollow.asked
        if wrong and whole.left_out:  # what was left out may be why
            return self.mismatch(plan, coords, sizes, every_block=True)
        return found

    def whole(self, every_block: bool) -> Whole:
        """What the code of the unsplit modules does.

        (For a `cached_property` Python 3.11 holds a lock, and model code may plan, too.)
        """
        every_block = every_block or not self.alike
        if every_block not in self._whole:
            like = like_earlier(self.root, () if every_block else self.alike)
            found = self._run(every_block, like) or self._run(every_block, {})
            assert found is not None, "nothing was hollow"
            self._whole[every_block] = found
        return self._whole[every_block]

    def _run(self, every_block: bool, hollow: Mapping[str, nn.Module]) -> Whole | None:
        """What the code does; None where it asks for what `hollow` blocks hold."""
        blocks = LikeBlocks(() if every_block else self.alike, hollow=Hollow(hollow.values()))
        with shortened(self.root, self.stacks):
            calls = calls_of(self.root, self.runs, self.opaque, blocks.watch, blocks.hollow)
        if blocks.hollow.asked or (hollow and calls is None):
            return None
        return Whole(calls, frozenset(blocks.left_out), blocks.numbered, hollow)


class Whole(NamedTuple):
    """What code of unsplit modules calls, where it runs; the calls of blocks that were left out.

    And whether code of blocks asks for the number of its block, and the blocks that are not needed.
    """

    calls: Calls | None
    left_out: frozenset[tuple[str, int]]
    numbered: bool
    hollow: Mapping[str, nn.Module]
