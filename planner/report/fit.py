"""Whether a plan fits the memory of its device, and on how many ranks it would."""

from __future__ import annotations

from contextlib import suppress

from shardwright.errors import ShardwrightError
from shardwright.planner.contract.mesh import MOST_RANKS, TP
from shardwright.planner.contract.plan_figures import Memory
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.devices.device import device
from shardwright.planner.units import human_bytes


def memory_of(plan: Plan) -> Memory:
    """What the fullest rank holds."""
    predicted = plan.predicted
    return predicted.memory or Memory(parameters=max(predicted.parameter_bytes))


def memory_limit(plan: Plan) -> int | None:
    """Bytes that a rank may hold: as asked for, or the device's; None if that is unknown."""
    if plan.objective.memory_bytes is not None:
        return plan.objective.memory_bytes
    with suppress(ShardwrightError):  # the profile may be a file of another machine
        return device(plan.workload.device).memory_bytes
    return None


def fits(plan: Plan) -> bool:
    """Whether the fullest rank stays within the limit, as far as that is known."""
    limit = memory_limit(plan)
    return limit is None or memory_of(plan).total <= limit


def ranks_that_fit(plan: Plan) -> int | None:
    """An estimate of the least tp, doubled step by step, on which the plan would fit.

    What is sharded shrinks with the number of ranks; replicated parameters, cache and activations
    are taken to stay as they are. None if no number of ranks would do.
    """
    limit, held, tp = memory_limit(plan), memory_of(plan), plan.mesh[TP]
    if limit is None or tp < 2:
        return None
    whole, part = plan.predicted.unsharded_bytes, max(plan.predicted.parameter_bytes)
    replicated = max(tp * part - whole, 0) // (tp - 1)
    states = (held.parameters + held.gradients + held.optimizer) / max(part, 1)
    ranks = tp
    while ranks <= MOST_RANKS:
        per_rank = replicated + (whole - replicated) / ranks
        if states * per_rank + held.cache + held.activations <= limit:
            return ranks
        ranks *= 2
    return None


def misfit(plan: Plan) -> str | None:
    """What to say of a plan that does not fit; None if it does."""
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
