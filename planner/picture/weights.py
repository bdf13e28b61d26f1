"""The parameters of a plan, each once for blocks that are alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardwright.planner.contract.dims import is_split
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.names import lookup, pattern
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_figures import DrawnItem
from shardwright.planner.contract.plan_file import ModulePlan, ParameterPlan, Plan

ITEMSIZE = {"float64": 8, "float32": 4}
"""Bytes of an element, where it is not 2."""
MOST = 1 << 16
"""Blocks of a stack: no model has more."""


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        name: Its name, with the numbers of its blocks: `layers.0-31.mlp.up.weight`.
        one: The full name of one of them.
        count: How many are alike.
        shape: Of the unsplit one.
        layer: What its module becomes.
        entry: How it lies; None where it is whole on every rank.
        item: What reads it.
        itemsize: Bytes of an element.
    """

    name: str
    one: str
    count: int
    shape: tuple[int, ...]
    layer: str
    entry: ParameterPlan | None
    item: DrawnItem
    itemsize: int

    @cached_property
    def placement(self) -> Placement:
        """How it lies on the ranks."""
        text = self.entry.placement if self.entry else ", ".join(map(str, self.shape))
        return parse(text)

    @property
    def is_split(self) -> bool:
        """Whether no rank holds all of it."""
        return any(map(is_split, self.placement.dims))

    @property
    def whole_bytes(self) -> int:
        """Bytes of one, unsplit."""
        return prod(self.shape) * self.itemsize

    def bytes_at(self, at: Coords) -> int:
        """Bytes of one on the rank at `at`."""
        return prod(n or 0 for n in self.placement.local_shape(at)) * self.itemsize


class Weights:
    """All parameters of a plan, by the block and the item that reads them.

    Attributes:
        found: Number of a block, number of an item -> its parameters, the largest first.
        rest: Those that no item reads.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.size = ITEMSIZE.get(plan.workload.dtype, 2)
        by_owner: dict[str, list[str]] = {}
        for name in plan.model.parameters:
            by_owner.setdefault(name.rpartition(".")[0], []).append(name)
        self.found: dict[tuple[int, int], list[Weight]] = {}
        seen: set[str] = set()
        done: set[tuple[int, str]] = set()
        for b, block in enumerate(plan.drawing):
            first = first_of(block.modules[0])
            for i, item in enumerate(block.items):
                owner = ".".join(filter(None, (first, item.module)))
                if item.slot is not None or item.blocks or not item.ops or (b, owner) in done:
                    continue
                done.add((b, owner))
                stored = by_owner.get(owner) or by_owner.get(pattern(owner), ())
                row = [
                    self._weight(_within(owner, n), block.modules, item, block.count)
                    for n in stored
                ]
                seen |= {*stored}
                seen |= {
                    _within(".".join(filter(None, (each, item.module))), n)
                    for modules in block.modules
                    for each in each_of(modules)
                    for n in stored
                }
                self.found[b, i] = sorted(
                    row, key=lambda w: (-prod(w.shape), not w.name.endswith("weight"))
                )
        left = (n for n in plan.model.parameters if n not in seen)
        self.rest = [self._weight(n, [""], DrawnItem(), 1) for n in left]

    def __iter__(self):  # noqa: ANN204
        for row in self.found.values():
            yield from row
        yield from self.rest

    def _weight(self, one: str, blocks: list[str], item: DrawnItem, count: int) -> Weight:
        owner, _, key = one.rpartition(".")
        module = self.plan.module(owner) or ModulePlan()
        shape = tuple(lookup(self.plan.model.parameters, one) or ())
        first, many = first_of(blocks[0]), ", ".join(blocks)
        name = many + one.removeprefix(first) if first else one
        entry = module.parameters.get(key)
        return Weight(name, one, count, shape, module.layer, entry, item, self.size)


def first_of(modules: str) -> str:
    """The name of the first of `layers.0-31`."""
    stack, dot, number = modules.rpartition(".")
    return f"{stack}{dot}{number.partition('-')[0]}" if number[:1].isdigit() else modules


def each_of(modules: str) -> list[str]:
    """The names of all of `layers.0-31`."""
    stack, dot, numbers = modules.rpartition(".")
    first, _, last = numbers.partition("-")
    if not last.isdigit():
        return [modules]
    return [f"{stack}{dot}{n}" for n in range(int(first), min(int(last), MOST) + 1)]


def _within(owner: str, name: str) -> str:
    key = name.rpartition(".")[2]
    return f"{owner}.{key}" if owner else key
