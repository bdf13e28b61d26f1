"""The strip at the head of a plan: memory, time, collectives, proof; what was checked."""

from __future__ import annotations

from typing import get_args

from shardwright.planner.contract.plan_figures import Phase
from shardwright.planner.contract.plan_file import Plan, digest_of
from shardwright.planner.picture.facts import Figure, phase_in_words
from shardwright.planner.picture.memory_bar import uses
from shardwright.planner.picture.time_line import shares
from shardwright.planner.units import human_bytes, human_time


def phases(plan: Plan) -> dict[Phase, int]:
    """What each phase takes, in the order in which they are run."""
    known = plan.predicted.phase_ns
    return {phase: known[phase] for phase in get_args(Phase) if phase in known}


def verdict(plan: Plan) -> list[Figure]:
    """The strip: what matters most."""
    return [_held(plan), *_times(plan), _sent(plan), _proof(plan)]


def _held(plan: Plan) -> Figure:
    predicted, room = plan.predicted, plan.objective.memory_bytes
    total = sum(use.bytes for use in uses(plan))
    parts = f"{human_bytes(max(predicted.parameter_bytes))} of parameters"
    share = total / room if room else None
    of = f"{share:.0%} of {human_bytes(room)}; " if room and share is not None else ""
    return Figure("held by a rank", human_bytes(total), total, of + parts, share)


def _times(plan: Plan) -> list[Figure]:
    out = []
    for phase, ns in phases(plan).items():
        more = ""
        if plan.drawing:
            more = f"{shares(plan, phase)[1] / max(ns, 1):.0%} of it communication"
        out.append(Figure(phase_in_words(phase), human_time(ns), ns, more))
    return out


def _sent(plan: Plan) -> Figure:
    found = plan.predicted.collectives
    ahead = [c for c in found if c.phase == "forward"]
    rest = [
        f"{p}: {sum(c.count for c in found if c.phase == p):,}"
        for p in ("decode", "backward")
        if any(c.phase == p for c in found)
    ]
    number = sum(c.count for c in ahead)
    size = human_bytes(sum(c.bytes for c in ahead))
    more = "; ".join([f"{size} enter them on a rank", *rest])
    return Figure("collectives of a forward", f"{number:,}", number, more)


def _proof(plan: Plan) -> Figure:
    solver = plan.solver
    if solver.status == "optimal":
        by = solver.proved_by or solver.name
        return Figure("optimal", "proven", solver.gap, f"by {by}: no plan is better, gap 0")
    gap = solver.gap / max(solver.objective[0], 1)
    return Figure("at most above the optimum", f"{gap:.2%}", solver.gap, f"by {solver.name}")


def checks(plan: Plan) -> list[str]:
    """What else is to be known: of checks that it passed, and notes."""
    whole = plan.digest == digest_of(plan.model_dump())
    out = [
        "Every op was held against its rule, and the model's own code run on the shapes of a "
        "rank, before this plan was written; it is as it was written."
        if whole
        else "This plan was edited since it was written, or an older release wrote it: "
        "shardwright check --accept proves it."
    ]
    if plan.solver.note:
        out.append(f"Note: {plan.solver.note}.")
    if plan.opaque:
        ops = ", ".join(plan.opaque)
        out.append(f"Ops without a rule, whose tensors stay whole: {ops}.")
    return out
