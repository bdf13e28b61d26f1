"""Lists the steps of each distinct block: what runs, what it reads, what ranks send."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_figures import CollectiveCount, DrawnBlock, DrawnItem, Phase
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.weights import Weight
from shardwright.planner.units import human_bytes, human_time
from shardwright.planner.wording import kind_in_words

SIGNS = {"add": "+", "mul": "×", "sub": "−", "div": "÷"}
SILENT = frozenset("_to_copy clone copy view alias permute transpose slice expand".split())
"""Ops that tell nothing about what is computed."""
SHORTEST = 0.004
"""Spans with a smaller share of a bar are joined."""


@dataclass(frozen=True)
class Tensor:
    """A tensor that a step reads, or that leaves the block."""

    source: str
    placement: str

    @property
    def state(self) -> str:
        """`replicated`, `sharded` or `partial`."""
        read = parse(self.placement)
        return "partial" if read.partial else "sharded" if read.meshes else "replicated"


@dataclass(frozen=True)
class Step:
    """A step of a block.

    Attributes:
        kind: "weight", "op", "redistribution" or "blocks".
        name: Its label.
        detail: What it computes, or the line of code.
        reads: The tensors that it reads.
        weights: The parameters that it reads, the largest first.
        target: For "blocks", the number of the block that it runs.
        sent: Collectives of the forward and backward pass, in words.
        time: Time of a phase, in words.
    """

    kind: str
    name: str
    detail: str
    reads: list[Tensor]
    weights: list[Weight] = field(default_factory=list)
    target: int | None = None
    sent: str = ""
    time: str = ""


@dataclass(frozen=True)
class Span:
    """Something that takes `ns` nanoseconds, `sent` of them for redistribution."""

    name: str
    ns: int
    sent: int

    @property
    def told(self) -> str:
        """Return its name and time."""
        return f"{self.name}: {human_time(self.ns)}"


class Blocks:
    """The blocks of a plan, by number.

    Args:
        plan: The plan.
        weights: (block, step) -> the parameters that the step reads.
    """

    def __init__(self, plan: Plan, weights: dict[tuple[int, int], list[Weight]]) -> None:
        self.plan, self.drawing, self.weights = plan, plan.drawing, weights

    def title(self, number: int) -> str:
        """Return the title of a block."""
        return ", ".join(filter(None, self.drawing[number].modules)) or "the model"

    def steps(self, number: int, phase: Phase | None) -> list[Step]:
        """Return a block's steps in execution order, with their times in a phase."""
        block = self.drawing[number]
        return [
            self._step(number, i, item, phase)
            for i, item in enumerate(block.items)
            if item.ops or item.blocks or item.takes or item.slot is not None
        ]

    def _step(self, number: int, i: int, item: DrawnItem, phase: Phase | None) -> Step:
        weights = self.weights.get((number, i), [])
        kind = "redistribution" if item.slot is not None else "op"
        kind = "blocks" if item.blocks else "weight" if weights else kind
        ops = ", ".join(op.strip("_") for op in item.ops)
        spent = self._item_ns(item, phase)[0] if phase else 0
        return Step(
            kind,
            self.label(number, i),
            " · ".join(filter(None, (item.module if kind == "op" else ops, item.source))),
            self._tensors(number, item.takes),
            weights,
            min(map(int, item.blocks), default=None),
            sent(item.collectives),
            human_time(spent) if spent else "",
        )

    def _tensors(self, number: int, found: dict[str, str]) -> list[Tensor]:
        """List tensors by their origin: inputs of the block first, then steps in order."""
        steps = sorted((int(key), text) for key, text in found.items() if key.isdigit())
        return [
            *(Tensor(key, text) for key, text in sorted(found.items()) if not key.isdigit()),
            *(Tensor(self.label(number, i), text) for i, text in steps),
        ]

    def leaves(self, number: int) -> list[Tensor]:
        """Return the tensors that leave a block."""
        return self._tensors(number, self.drawing[number].gives)

    def label(self, number: int, i: int) -> str:
        """Return a step's label: its collective, the module with its weights, or its ops."""
        item = self.drawing[number].items[i]
        if item.slot is not None:
            ahead = {c.kind.replace("_", "-") for c in item.collectives if c.phase != "backward"}
            back = {c.kind.replace("_", "-") for c in item.collectives}
            words = " + ".join(sorted(ahead or back))
            return words if ahead else f"{words} (backward)" if back else "reshard locally"
        if item.blocks:
            return f"{item.module} × {sum(item.blocks.values())}"
        if self.weights.get((number, i)):
            words = item.module.split(".")
            last = max((n for n, word in enumerate(words) if not word.isdigit()), default=0)
            return ".".join(words[last:])
        ops = [op for op in item.ops if op not in SILENT] or item.ops
        products = any(op.endswith(("mm", "matmul")) for op in ops)
        if any("attention" in op or (products and "softmax" in op) for op in ops):
            return "attention"
        if len(ops) == 1 and ops[0] in SIGNS:
            return SIGNS[ops[0]]
        return ", ".join(op.strip("_") for op in ops[:2]) or "other ops"

    def spans(self, number: int, phase: Phase) -> list[Span]:
        """Return what a block spends time on in a phase, in order; short spans are joined."""
        least = SHORTEST * self.time(number, phase)[0]
        out: list[Span] = []
        joined = False
        for i, item in enumerate(self.drawing[number].items):
            ns, moved = self._item_ns(item, phase)
            if ns and ns < least and joined:
                out[-1] = Span("small steps", out[-1].ns + ns, out[-1].sent + moved)
            elif ns:
                out.append(Span(self.label(number, i), ns, moved))
                joined = ns < least
        return out

    def time(self, number: int, phase: Phase) -> tuple[int, int]:
        """Return a block's nanoseconds in a phase, and how many are for redistribution."""
        found = [self._item_ns(item, phase) for item in self.drawing[number].items]
        return sum(ns for ns, _ in found), sum(moved for _, moved in found)

    def _item_ns(self, item: DrawnItem, phase: Phase) -> tuple[int, int]:
        ns = item.phase_ns.get(phase, 0)
        moved = ns if item.slot is not None else 0
        for key, times in item.blocks.items():
            inner = self.time(int(key), phase)
            ns, moved = ns + times * inner[0], moved + times * inner[1]
        return ns, moved

    def collectives(self, block: DrawnBlock) -> list[CollectiveCount]:
        """Return all collectives of a block, including those of blocks within it."""
        out: list[CollectiveCount] = []
        for item in block.items:
            out += item.collectives
            for key, times in item.blocks.items():
                out += [
                    c.model_copy(update={"count": times * c.count, "bytes": times * c.bytes})
                    for c in self.collectives(self.drawing[int(key)])
                ]
        return out


def sent(found: Iterable[CollectiveCount]) -> str:
    """List collectives by phase: `forward 2 all-reduce (8.0 MiB); backward ...`."""
    sums: dict[str, dict[str, tuple[int, int]]] = {}
    for c in found:
        if c.count:
            kind = kind_in_words(c)
            count, size = sums.setdefault(c.phase, {}).get(kind, (0, 0))
            sums[c.phase][kind] = (count + c.count, size + c.bytes)
    return "; ".join(
        f"{phase} " + ", ".join(
            f"{f'{count:,} ' if count > 1 else ''}{kind} ({human_bytes(size)})"
            for kind, (count, size) in kinds.items()
        )
        for phase, kinds in sums.items()
    )  # fmt: skip
