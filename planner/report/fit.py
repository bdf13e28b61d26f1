"""Checks whether a plan fits its device's memory, and estimates on how many ranks it would."""

from __future__ import annotations

from contextlib import suppress

from shardwright.errors import ShardwrightError
from shardwright.planner.contract.mesh import MAX_RANKS, TP
from shardwright.planner.contract.plan_figures import Memory
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.devices.device import device
from shardwright.planner.units import human_bytes


def memory_of(plan: Plan) -> Memory:
    """Return what the fullest rank holds."""
    predicted = plan.predicted
    return predicted.memory or Memory(parameters=max(predicted.parameter_bytes))


def memory_limit(plan: Plan) -> int | None:
    """Return the bytes a rank may hold: the user's limit or the device's; None if unknown."""
    if plan.objective.memory_bytes is not None:
        return plan.objective.memory_bytes
    with suppress(ShardwrightError):  # the profile may be a file on another machine
        return device(plan.workload.device).memory_bytes
    return None


def fits(plan: Plan) -> bool:
    """Return whether the fullest rank stays within the limit; True if the limit is unknown."""
    limit = memory_limit(plan)
    return limit is None or memory_of(plan).total <= limit


def ranks_that_fit(plan: Plan) -> int | None:
    """Estimate the least tp, doubled step by step, on which the plan would fit.

    Sharded parameters shrink with the number of ranks. Replicated parameters, cache and activations
    are assumed to stay the same. Returns None if no number of ranks is enough.
    """
    limit, held, tp = memory_limit(plan), memory_of(plan), plan.mesh[TP]
    if limit is None or tp < 2:
        return None
    whole, part = plan.predicted.unsharded_bytes, max(plan.predicted.parameter_bytes)
    replicated = max(tp * part - whole, 0) // (tp - 1)
    states = (held.parameters + held.gradients + held.optimizer) / max(part, 1)
    ranks = tp
    while ranks <= MAX_RANKS:
        per_rank = replicated + (whole - replicated) / ranks
        if states * per_rank + held.cache + held.activations <= limit:
            return ranks
        ranks *= 2
    return None


def misfit(plan: Plan) -> str | None:
    """Return the message for a plan that does not fit; None if it fits."""
    limit = memory_limit(plan)
    if limit is None or fits(plan):
        return None
    ranks = ranks_that_fit(plan)
    advice = "use a larger device, a smaller batch or a smaller dtype"
    if ranks is not None:
        advice = f"about {ranks} ranks would fit (an estimate): --tp {ranks}"
    return (
        f"the plan does not fit: a rank holds {human_bytes(memory_of(plan).total)}, and "
        f"{human_bytes(limit)} is what it may hold; {advice}"
    )
