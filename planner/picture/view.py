"""Prepares what the page says about one plan, in the order of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, get_args

from shardwright.planner.contract.mesh import TP
from shardwright.planner.contract.names import is_within, pattern
from shardwright.planner.contract.plan_figures import Phase, Prediction
from shardwright.planner.contract.plan_file import Plan, digest_of
from shardwright.planner.picture.blocks import Blocks, sent
from shardwright.planner.picture.mesh_chart import mesh_chart
from shardwright.planner.picture.sheets import Sheet, colour, ranks_of
from shardwright.planner.picture.weights import Weight, Weights
from shardwright.planner.report.fit import fits, memory_limit, memory_of, misfit
from shardwright.planner.report.mesh_table import mesh_rows
from shardwright.planner.units import human_bytes, human_time
from shardwright.planner.wording import (
    HELD,
    costs_in_words,
    objective_in_words,
    placement_in_words,
    workload_in_words,
)

if TYPE_CHECKING:  # these import torch, which showing a plan does not need
    from shardwright.planner.hand_written.price import HandWritten
    from shardwright.planner.report.explain import Explanation

LARGE = 0.01
"""Replicated parameters are listed if they have at least this share of all bytes."""
IN_LEGEND = 32
"""Most ranks in the legend."""


@dataclass(frozen=True)
class Shown:
    """A plan to show, with optional comparisons.

    Attributes:
        plan: The plan.
        name: Its name on the page, for example its file.
        hand: The plan of transformers, priced.
        explained: Costs of alternatives.
        unsharded: Costs without a plan, if every rank computes everything.
    """

    plan: Plan
    name: str = ""
    hand: HandWritten | None = None
    explained: Sequence[Explanation] = field(default=())
    unsharded: Prediction | None = None


@dataclass(frozen=True)
class Figure:
    """A figure at the top of the page; `bad` ones are red."""

    label: str
    text: str
    value: int
    more: str
    share: float | None = None
    bad: bool = False


class View:
    """One plan on the page."""

    held = HELD

    def __init__(self, shown: Shown, number: int) -> None:
        self.shown, self.plan, self.id = shown, shown.plan, f"p{number}"
        self.ranks = ranks_of(self.plan)
        self.weights = Weights(self.plan)
        self.blocks = Blocks(self.plan, self.weights.found)
        known = self.plan.predicted.phase_ns
        self.phases: dict[Phase, int] = {p: known[p] for p in get_args(Phase) if p in known}
        self.meshes = mesh_rows(self.plan) if self.plan.meshes else []
        """Headings and a row for each mesh that was compared; empty if the mesh was given."""
        self.mesh_chart = mesh_chart(self.plan, memory_limit(self.plan))
        self.phase = next(iter(self.phases), None)
        """The phase whose times are shown next to steps: the first."""

    # --- the head

    @property
    def lead(self) -> str:
        """Say what was priced and minimized."""
        return (
            f"Priced for {workload_in_words(self.plan.workload)}. "
            f"Objective: {objective_in_words(self.plan.objective)}."
        )

    @cached_property
    def figures(self) -> list[Figure]:
        """Return the figures: memory, time, collectives, optimality."""
        return [self._memory(), *self._times(), self._collectives(), self._optimality()]

    def _memory(self) -> Figure:
        total = sum(self.memory.values())
        room = memory_limit(self.plan)
        share = total / room if room else None
        parameters = human_bytes(max(self.plan.predicted.parameter_bytes))
        more = f"{parameters} of parameters"
        if room and share:
            more = f"{share:.0%} of {human_bytes(room)}, {more}"
        bad = not fits(self.plan)
        more = f"DOES NOT FIT: {more}" if bad else more
        return Figure("memory per rank", human_bytes(total), total, more, share, bad)

    def _times(self) -> Iterable[Figure]:
        for phase, ns in self.phases.items():
            moved = self.blocks.time(0, phase)[1] if self.plan.drawing else 0
            more = [f"{moved / max(ns, 1):.0%} of it communication"] * bool(self.plan.drawing)
            if self.shown.unsharded and phase in self.shown.unsharded.phase_ns:
                alone = self.shown.unsharded.phase_ns[phase]
                more.append(f"unsharded: {human_time(alone)}")
            yield Figure(phase_name(phase), human_time(ns), ns, "; ".join(more))

    def _collectives(self) -> Figure:
        found = self.plan.predicted.collectives
        counts = {
            phase: sum(c.count for c in found if c.phase == phase)
            for phase in ("forward", "decode", "backward")
        }
        size = human_bytes(sum(c.bytes for c in found if c.phase == "forward"))
        rest = [f"{phase}: {n:,}" for phase, n in counts.items() if n and phase != "forward"]
        more = "; ".join([f"{size} enter them on a rank", *rest])
        return Figure("collectives in forward", f"{counts['forward']:,}", counts["forward"], more)

    def _optimality(self) -> Figure:
        solver = self.plan.solver
        by, gap = f"found by {solver.name}", solver.gap / max(solver.objective[0], 1)
        text, more = f"gap {gap:.2%}", f"{by}: no plan is better by more than the gap"
        if solver.status == "optimal":
            by = f"proven by {solver.proved_by or solver.name}"
            text, more = "proven", f"{by}: no plan is better"
            if not fits(self.plan):
                text, more = "gap 0%", f"{by}, for least memory"
        return Figure("optimality", text, solver.gap, more)

    @property
    def notes(self) -> list[str]:
        """Say whether the plan was checked, and return the planner's notes."""
        plan = self.plan
        out = [
            "Every op was checked against its rule, and the model's code was run with the shapes "
            "of a rank. The plan is unchanged since."
            if plan.digest == digest_of(plan.model_dump())
            else "This plan was edited, or an older release wrote it: shardwright check --accept "
            "proves it."
        ]
        out += [f"Note: {plan.solver.note}."] * bool(plan.solver.note)
        if plan.opaque:
            out.append(
                f"Ops without a rule keep their tensors replicated: {', '.join(plan.opaque)}."
            )
        return out

    @property
    def misfit(self) -> str | None:
        """Return the message that the plan does not fit the device; None if it fits."""
        text = misfit(self.plan)
        return text and text[0].upper() + text[1:] + "."

    @property
    def legend(self) -> list[tuple[int, str]]:
        """Return ranks and their colours."""
        return [(rank, colour(rank)) for rank in range(min(len(self.ranks), IN_LEGEND))]

    @property
    def row(self) -> list[tuple[str, str, bool]]:
        """Return (label, text, bad) for the plan's row in the table of several plans."""
        room = memory_limit(self.plan)
        head = [("mesh", ", ".join(f"{n}={size}" for n, size in self.plan.mesh.items()), False)]
        head.append(("memory limit", human_bytes(room) if room else "none", False))
        return head + [(f.label, f.text, f.bad) for f in self.figures]

    # --- blocks

    def costs(self, number: int) -> list[tuple[str, str, str, str]]:
        """Return (phase, time, its communication, time of all blocks) of one block."""
        out = []
        for phase in self.phases:
            ns, moved = self.blocks.time(number, phase)
            every = human_time(ns * self.plan.drawing[number].count)
            share = f"{human_time(moved)} ({moved / max(ns, 1):.0%})"
            out.append((phase_name(phase), human_time(ns), share, every))
        return out

    def sent(self, number: int) -> str:
        """Return the collectives of one block in words."""
        return sent(self.blocks.collectives(self.plan.drawing[number])) or "none"

    # --- weights

    @cached_property
    def closeups(self) -> list[Weight]:
        """Return the weights with a close-up: sharded, large, or the largest of a step."""
        total = self.plan.predicted.unsharded_bytes
        first = {row[0].id for row in self.weights.found.values() if row}
        found = {w.id: w for w in self.weights}.values()
        return [
            w for w in found
            if w.is_split or len(w.shape) > 1 or w.id in first
            or w.unsharded_bytes * w.count >= LARGE * total
        ]  # fmt: skip

    def sheet(self, weight: Weight) -> Sheet:
        """Return a weight as cells."""
        return Sheet(weight, self.ranks)

    def leader(self, weight: Weight) -> Weight:
        """Return the largest weight of its step: their close-ups are shown together."""
        return next((row[0] for row in self.weights.found.values() if weight in row), weight)

    def facts(self, weight: Weight) -> list[tuple[str, str]]:
        """Return (label, text) pairs about a weight."""
        entry, shape = weight.entry, " × ".join(f"{n:,}" for n in weight.shape)
        many = f", × {weight.count} alike" if weight.count > 1 else ""
        module = weight.one.rpartition(".")[0]
        pin = next((f"{n}={p}" for n, p in self.plan.pins.items() if is_within(weight.one, n)), "")
        found = [
            ("shape", f"{shape}: {human_bytes(weight.unsharded_bytes)}{many}"),
            ("module", f"{module}, as {weight.layer}"),
            ("placement", entry.placement if entry else "replicated"),
            ("in words", placement_in_words(weight.layer, entry) if entry else ""),
            ("used as", (entry.use or "") if entry else ""),
            ("code", weight.item.source),
            ("pinned", pin),
            ("why", self.plan.reason(weight.one)),
        ]
        return [(what, text) for what, text in found if text]

    def explained(self, weight: Weight) -> Explanation | None:
        """Return what a weight's alternatives would cost."""
        names = (weight.one, pattern(weight.one))
        return next((e for e in self.shown.explained if e.name in names), None)

    # --- memory, time, tables

    @cached_property
    def memory(self) -> dict[str, int]:
        """Return the bytes on the fullest rank, by purpose."""
        held = memory_of(self.plan)
        return {key: n for key in HELD if (n := getattr(held, key))}

    @property
    def free(self) -> int:
        """Return the unused bytes of the memory limit."""
        return max((memory_limit(self.plan) or 0) - sum(self.memory.values()), 0)

    @property
    def uneven(self) -> str:
        """Say how parameter sizes differ between ranks; empty if they are equal."""
        sizes = self.plan.predicted.parameter_bytes
        least, most = human_bytes(min(sizes)), human_bytes(max(sizes))
        if least == most:
            return ""
        return (
            f"Parameters and buffers: from {least} (rank {sizes.index(min(sizes))}) to {most} "
            f"(rank {sizes.index(max(sizes))})."
        )

    @property
    def replicated(self) -> list[tuple[str, str, str, str]]:
        """Return (name, bytes, bytes of further copies, reason) of large replicated parameters."""
        alike = Counter((pattern(r.parameter), r.bytes, r.reason) for r in self.plan.replicated)
        copies = self.plan.mesh[TP] - 1
        return [
            (f"{name}{f' × {n}' if n > 1 else ''}", human_bytes(n * size),
             human_bytes(n * copies * size), why)
            for (name, size, why), n in alike.items()
        ]  # fmt: skip

    @property
    def small(self) -> str:
        """Return the bytes of all other replicated parameters."""
        listed = {pattern(r.parameter) for r in self.plan.replicated}
        return human_bytes(sum(
            w.unsharded_bytes * w.count
            for w in self.weights if not w.is_split and pattern(w.one) not in listed
        ))  # fmt: skip

    @property
    def hand(self) -> list[tuple[str, str, str]]:
        """Return (label, this plan, transformers' plan) for the comparison."""
        hand = self.shown.hand
        if hand is None or hand.predicted is None:
            return []
        ours, theirs = costs_in_words(self.plan.predicted), costs_in_words(hand.predicted)
        return [(n, ours.get(n, "none"), theirs.get(n, "none")) for n in {**ours, **theirs}]

    @property
    def hand_replicated(self) -> str:
        """List the larger parameters that transformers' plan replicates."""
        found = self.shown.hand.replicated if self.shown.hand else {}
        least = LARGE * self.plan.predicted.unsharded_bytes
        return ", ".join(f"{name} ({human_bytes(n)})" for name, n in found.items() if n >= least)


def phase_name(phase: str) -> str:
    """Return the name of one run of a phase."""
    return {"decode": "decode step", "train": "training step"}.get(phase, phase)
