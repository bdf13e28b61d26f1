"""What the page says of one plan: facts and drawings, by where they stand on the page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import get_args

from markupsafe import Markup

from shardwright.planner.contract.mesh import CP, TP
from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_figures import CollectiveCount, DrawnBlock, Phase
from shardwright.planner.picture.block import BlockDrawing, Ids, block_ns, title
from shardwright.planner.picture.cells import ranks_of
from shardwright.planner.picture.close_up import CloseUp
from shardwright.planner.picture.facts import Block, Cost, Figure, Shown, Weighed, phase_in_words
from shardwright.planner.picture.memory_bar import Use, bar, rank_bars, uses
from shardwright.planner.picture.palette import Palette, colours
from shardwright.planner.picture.time_line import LANES, line, shares, spans
from shardwright.planner.picture.verdict import checks, phases, verdict
from shardwright.planner.picture.weights import Weight, Weights
from shardwright.planner.picture.words import kinds, numbered
from shardwright.planner.units import human_bytes, human_time
from shardwright.planner.wording import objective_in_words, placement_in_words

LARGE = 0.01
"""What is left whole is listed from this share of all bytes on."""


class View:
    """One plan on the page."""

    def __init__(self, shown: Shown, number: int) -> None:
        self.shown, self.plan, self.id = shown, shown.plan, f"p{number}"
        self.ids = Ids(self.id)
        ranks = ranks_of(self.plan)
        self.palette = Palette(ranks, colours(len(ranks)))
        self.weights = Weights(self.plan)

    @cached_property
    def phase_ns(self) -> dict[Phase, int]:
        """What each phase takes, in the order in which they are run."""
        return phases(self.plan)

    # --- the head

    @property
    def model(self) -> str:
        """Class of the model."""
        return self.plan.model.architecture

    @cached_property
    def ranks(self) -> str:
        """On how many ranks, and as which mesh."""
        plan = self.plan
        text = f"on {numbered(plan.world_size, 'rank')}"
        if plan.batch_dims:
            copies = prod(plan.mesh[name] for name in plan.batch_dims)
            text += f": {numbered(copies, 'copy' if copies == 1 else 'copies').rstrip('s')}"
            text = (
                text.replace("copie", "copies") + f" of the model, each split over {plan.mesh[TP]}"
            )
        if (cp := plan.mesh.get(CP, 1)) > 1:
            text += f", {cp} of which share a sequence"
        if plan.sub_axes:
            text += f" ({' × '.join(map(str, plan.sub_axes[TP]))})"
        return text

    @property
    def workload(self) -> str:
        """What was priced."""
        load = self.plan.workload
        known = [(p, load.phases[p]) for p in get_args(Phase) if p in load.phases]
        phases = ", ".join(f"{n} × {p}" if n > 1 else p for p, n in known)
        return (
            f"{phases}; batch {load.batch} of {load.seq:,} tokens, {load.dtype}, on {load.device}"
        )

    @property
    def objective(self) -> str:
        """What was to be least."""
        return objective_in_words(self.plan.objective)

    @cached_property
    def verdict(self) -> list[Figure]:
        """The strip: what matters most."""
        return verdict(self.plan)

    @property
    def checks(self) -> list[str]:
        """What else is to be known: of checks that it passed, and notes."""
        return checks(self.plan)

    # --- the model

    @cached_property
    def legend(self) -> list[tuple[str, str]]:
        """Rank and colour; of many ranks some."""
        some = list(enumerate(self.palette.colours))
        step = -(-len(some) // 16)
        return [(str(rank), colour) for rank, colour in some[::step]]

    @cached_property
    def blocks(self) -> list[Block]:
        """The model itself, then each distinct block."""
        out = []
        for number, block in enumerate(self.plan.drawing):
            draw = BlockDrawing(
                self.plan, number, self.weights.found, self.palette, self.ids,
                next(iter(self.phase_ns), None),
            )  # fmt: skip
            lines = [
                (phase_in_words(p), self._line(number, p))
                for p in self.phase_ns
                if number and block_ns(self.plan.drawing, number, p)
            ]
            costs = self._costs(number, block) if number else []
            name = title(block) if number else "The whole model"
            out.append(Block(self.ids.block(number), name, block.count, costs, draw.draw(), lines))
        return out

    def _line(self, number: int, phase: Phase) -> Markup:
        found = spans(self.plan.drawing, number, phase)
        what = f"{phase_in_words(phase)} of {title(self.plan.drawing[number])}"
        wide = 1170.0 if number == 0 else 660.0
        return line(found, f"{self.id}-t{number}-{phase}", what, wide)

    def _costs(self, number: int, block: DrawnBlock) -> list[Cost]:
        """What one block takes in each phase."""
        out, first = [], next(iter(self.phase_ns), None)
        calls = self._within(number)
        for phase in self.phase_ns:
            found = spans(self.plan.drawing, number, phase)
            total = sum(s.total for s in found)
            sent = sum(s.lane_ns(LANES[1]) for s in found)
            passes = ["decode"] if phase == "decode" != first else ["forward"]
            passes += ["backward"] * (phase == "train")
            sent_in = {p: kinds(_sum(calls, p), p) for p in passes}
            words = "; ".join(
                f"{p}: {text}" if len(passes) > 1 else text for p, text in sent_in.items() if text
            )
            share = f"{human_time(sent)} ({sent / max(total, 1):.0%})"
            every = human_time(total * block.count)
            out.append(
                Cost(phase_in_words(phase), words or "none", human_time(total), share, every)
            )
        if "train" not in self.phase_ns and (words := kinds(_sum(calls, "backward"), "backward")):
            out.append(Cost("backward, if it trains", words, "", "", ""))
        return out

    def _within(self, number: int) -> list[CollectiveCount]:
        out = []
        for item in self.plan.drawing[number].items:
            out += item.collectives
            for inside, times in item.blocks.items():
                out += [
                    c.model_copy(update={"count": times * c.count, "bytes": times * c.bytes})
                    for c in self._within(int(inside))
                ]
        return out

    # --- weights

    @cached_property
    def closeups(self) -> list[Weighed]:
        """Each weight close up: those that are split, and those that are large."""
        total = self.plan.predicted.unsharded_bytes
        found = {self.ids.weight(w): w for w in self.weights}
        return [
            self._weighed(key, w)
            for key, w in found.items()
            if w.is_split or len(w.shape) > 1 or w.whole_bytes * w.count >= LARGE * total
            or any(w in row[:1] for row in self.weights.found.values())
        ]  # fmt: skip

    def _weighed(self, key: str, weight: Weight) -> Weighed:
        close = CloseUp(weight, self.palette, key)
        entry = weight.entry
        words = placement_in_words(weight.layer, entry) if entry else "replicated"
        owner = weight.one.rpartition(".")[0]
        pin = next((f"{n}={p}" for n, p in self.plan.pins.items()
                    if f"{weight.one}.".startswith(f"{n}.")), None)  # fmt: skip
        reason = next(
            (r.reason for r in self.plan.replicated if pattern(r.parameter) == pattern(weight.one)),
            None,
        )
        explained = next(
            (e for e in self.shown.explained if e.name in (weight.one, pattern(weight.one))), None
        )
        first = next((row[0] for row in self.weights.found.values() if weight in row), weight)
        return Weighed(
            key, self.ids.weight(first), weight, close, words, owner, pin, reason, explained
        )

    @property
    def wholes(self) -> list[tuple[str, str, str, str]]:
        """(parameter, its bytes, what its copies take, why) of what is large and whole."""
        copies = self.plan.mesh[TP] - 1
        return [
            (r.parameter, human_bytes(r.bytes), human_bytes(copies * r.bytes), r.reason)
            for r in self.plan.replicated
        ]

    @property
    def small(self) -> str:
        """What else is whole, all of it together."""
        listed = {pattern(r.parameter) for r in self.plan.replicated}
        rest = sum(
            w.whole_bytes * w.count
            for w in self.weights
            if not w.is_split and pattern(w.one) not in listed
        )
        return human_bytes(rest)

    # --- memory and time

    @property
    def memory(self) -> Markup:
        """The bar of memory."""
        return bar(self.plan)

    @property
    def uses(self) -> list[Use]:
        """What it is for."""
        return uses(self.plan)

    @property
    def rank_bars(self) -> Markup | None:
        """Parameters of each rank, where they differ."""
        return rank_bars(self.plan, self.palette.colours)

    @property
    def phases(self) -> list[tuple[str, str, Markup]]:
        """Each phase: its name, what it takes, its line of time."""
        out = []
        for phase, ns in self.phase_ns.items():
            if self.plan.drawing:
                compute, sent = shares(self.plan, phase)
                words = (
                    f"{human_time(ns)}: {human_time(compute)} of computing, {human_time(sent)} of "
                    "changes of placement"
                )
                out.append((phase_in_words(phase), words, self._line(0, phase)))
        return out

    @property
    def hand(self) -> list[tuple[str, str, str]]:
        """(what, here, in transformers' table) of both."""
        hand = self.shown.hand
        if hand is None or hand.predicted is None:
            return []
        pairs = [_rows(self.plan.predicted), _rows(hand.predicted)]
        return [
            (name, pairs[0].get(name, "none"), pairs[1].get(name, "none"))
            for name in dict.fromkeys((*pairs[0], *pairs[1]))
        ]

    @property
    def hand_whole(self) -> list[tuple[str, str]]:
        """What transformers' table leaves whole, the larger ones."""
        found = self.shown.hand.replicated if self.shown.hand else {}
        least = LARGE * self.plan.predicted.unsharded_bytes
        return [(name, human_bytes(n)) for name, n in found.items() if n >= least]

    @property
    def row(self) -> list[Figure]:
        """The plan in the table of several."""
        room = self.plan.objective.memory_bytes
        mesh = ", ".join(f"{n}={size}" for n, size in self.plan.mesh.items())
        held, *rest = self.verdict
        return [
            Figure("ranks", mesh),
            Figure("budget", human_bytes(room) if room else "none"),
            held,
            *rest,
        ]


def _sum(found: Sequence[CollectiveCount], phase: str) -> list[CollectiveCount]:
    """Those of a phase, of a kind together."""
    out: dict[str, CollectiveCount] = {}
    for c in found:
        if c.phase == phase and c.count:
            old = out.get(c.kind)
            count, size = (old.count, old.bytes) if old else (0, 0)
            out[c.kind] = c.model_copy(update={"count": count + c.count, "bytes": size + c.bytes})
    return [*out.values()]


def _rows(predicted) -> dict[str, str]:  # noqa: ANN001
    held = max(predicted.parameter_bytes)
    out = {"parameters on a rank": human_bytes(held), "time": human_time(predicted.time_ns)}
    for c in predicted.collectives:
        out[f"{c.phase} {c.kind.replace('_', '-')}"] = f"{c.count:,} ({human_bytes(c.bytes)})"
    return out
