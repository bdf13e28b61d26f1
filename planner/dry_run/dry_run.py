"""What is run to try a plan: the whole model, or that with the traced blocks alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardwright.planner.blocks.stacks import Stack, shortened
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run.local_run import Mismatch, run_local
from shardwright.planner.trace.calls import Calls
from shardwright.planner.trace.on_fake import calls_of
from shardwright.planner.trace.opaque import Opaque
from shardwright.planner.trace.traced_calls import Run


@dataclass(frozen=True)
class DryRun:
    """Runs of `root`, shortened to the picked blocks of `stacks`.

    `watched` has (module, slot of its output, traced tensor) for each call of a module, in order.
    """

    root: nn.Module
    stacks: Sequence[Stack]
    runs: Sequence[Run]
    opaque: Opaque
    watched: Sequence[tuple[str, str, str]]
    _calls: list[Calls | None] = field(default_factory=list, init=False)

    def calls(self) -> Calls | None:
        """What the code of the unsplit modules calls.

        (For a `cached_property` Python 3.11 holds a lock, and model code may plan, too.)
        """
        if not self._calls:
            with shortened(self.root, self.stacks):
                self._calls.append(calls_of(self.root, self.runs, self.opaque))
        return self._calls[0]

    def mismatch(
        self, plan: Plan, coords: Coords, sizes: Mapping[str, tuple[int, ...]]
    ) -> Mismatch | None:
        """Make the runs as one rank; None if all is as `sizes`, of traced tensors, says."""
        predicted: dict[tuple[str, str], list[tuple[int, ...]]] = {}
        for module, slot, tensor in self.watched:
            predicted.setdefault((module, slot), []).append(sizes[tensor])
        calls = self.calls()
        with shortened(self.root, self.stacks):
            here = {name for name, _ in self.root.named_modules()}
            spoken = {n: m for n, m in plan.modules.items() if "*" in n or n in here}
            part = plan.model_copy(update={"modules": spoken}) if self.stacks else plan
            return run_local(self.root, self.runs, part, coords, predicted, self.opaque, calls)
