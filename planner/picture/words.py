"""How items and placements are called on the page."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_figures import CollectiveCount, DrawnItem
from shardwright.planner.units import human_bytes

SIGNS = {"add": "+", "mul": "×", "sub": "−", "div": "÷"}
SILENT = frozenset("_to_copy clone copy view alias permute transpose slice expand".split())
"""Ops that say nothing of what is computed."""

LIES = {
    "replicated": "whole on every rank",
    "sharded": "each rank has its part",
    "partial": "each rank has a term of the sum",
}
"""How a tensor lies, in the colours of edges."""


def lies(placement: str) -> str:
    """Whether a tensor is replicated, sharded or partial."""
    read = parse(placement)
    return "partial" if read.partial else "sharded" if read.meshes else "replicated"


def label(item: DrawnItem) -> str:
    """What an item without weights does, in a word or a sign."""
    ops = [op for op in item.ops if op not in SILENT] or item.ops
    if any("attention" in op for op in ops):
        return "attention"
    if any("softmax" in op for op in ops) and any(op.endswith(("mm", "matmul")) for op in ops):
        return "attention"
    if len(ops) == 1:
        return SIGNS.get(ops[0], ops[0].strip("_"))
    return ", ".join(op.strip("_") for op in ops[:2]) if ops else item.module.rpartition(".")[2]


def short(module: str) -> str:
    """The last word of a module's name that is one."""
    words = module.split(".")
    at = max((i for i, w in enumerate(words) if not w.isdigit()), default=0)
    return ".".join(words[at:])


def kinds(collectives: Iterable[CollectiveCount], phase: str = "forward") -> str:
    """What is sent in a phase: `2 all-reduce (8.0 MiB)`."""
    found = [c for c in collectives if c.phase == phase and c.count]
    return " + ".join(f"{_times(c)} ({human_bytes(c.bytes)})" for c in found)


def _times(c: CollectiveCount) -> str:
    kind = c.kind.replace("_", "-")
    return kind if c.count == 1 else f"{c.count:,} {kind}"


def numbered(n: int, word: str) -> str:
    """`1 rank`, `8 ranks`."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"
