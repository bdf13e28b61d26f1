"""What a plan predicts of a pass, and what a rank counted in one, in the same form."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.audit import Call, counts, total_bytes

Tally = dict[str, tuple[int, int]]
"""Kind of collective -> how many, and the bytes that entered them on one rank."""


def predicted(plan: Plan, phase: str) -> Tally:
    """The collectives that `plan` names for "forward" or "backward"."""
    return {c.kind: (c.count, c.bytes) for c in plan.predicted.collectives if c.phase == phase}


def counted(calls: list[Call]) -> Tally:
    """The same of what was counted in a run."""
    sizes = total_bytes(calls)
    return {kind: (n, sizes[kind]) for kind, n in counts(calls).items()}


def held(model: nn.Module) -> int:
    """Bytes that this rank holds of the parameters and buffers of `model`, tied ones once."""
    tensors = (*model.parameters(), *model.buffers())
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
