"""The phases of a workload, and the pass of each phase.

prefill   a forward over `batch` sequences of `seq` tokens
decode    a forward over one new token of each sequence, with a KV cache of `seq` tokens
train     a forward and a backward over `batch` sequences of `seq` tokens
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_figures import Phase, Workload

PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Pass:
    """A pass, how often the workload makes it, and the run-time lengths in it.

    `queries` is the number of tokens of a sequence that go through the model, `keys` the number of
    tokens that attention attends to.
    """

    phase: Phase
    times: int
    batch: int
    queries: int
    keys: int

    @property
    def trains(self) -> bool:
        """Whether a backward pass follows."""
        return self.phase == "train"


def passes(workload: Workload) -> list[Pass]:
    """Return the passes of one copy of the model: prefill first, then decode, then train."""
    batch, seq = own_batch(workload), workload.seq
    return [
        Pass(phase, workload.phases[phase], batch, 1 if phase == "decode" else seq, seq)
        for phase in PHASES
        if phase in workload.phases
    ]


def own_batch(workload: Workload) -> int:
    """Return the sequences of the copy of the model that takes most."""
    return -(-workload.batch // workload.replicas)


def parse_phases(asked: str | Mapping[Phase, int]) -> dict[Phase, int]:
    """Parse phases with optional counts: `prefill`, `prefill,decode:128`, or a mapping.

    Raises:
        UsageError: a phase is unknown or named twice, or a count is invalid.
    """
    if not isinstance(asked, str):
        asked = ",".join(f"{phase}:{n}" for phase, n in asked.items())
    counts: dict[str, int] = {}
    for part in asked.split(","):
        word, _, count = (piece.strip() for piece in part.partition(":"))
        if word not in PHASES:
            raise UsageError(f"unknown phase '{word:.60}'; known: {', '.join(PHASES)}")
        if word in counts:
            raise UsageError(f"phase '{word}' is named twice in '{asked}'")
        if ":" in part and not re.fullmatch("0*[1-9][0-9]{0,11}", count):
            raise UsageError(
                f"'{part.strip():.60}': how often '{word}' is run is a number from 1 on"
            )
        counts[word] = int(count or 1)
    return {phase: counts[phase] for phase in PHASES if phase in counts}
