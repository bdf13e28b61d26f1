"""Collects a plan's parameters, one for each distinct block, with the step that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardwright.planner.contract.dims import is_split
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.names import grouped, lookup, pattern
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_figures import DrawnItem
from shardwright.planner.contract.plan_file import ModulePlan, ParameterPlan, Plan

ITEMSIZE = {"float64": 8, "float32": 4}
"""Bytes of an element, for dtypes with other than 2."""


@dataclass(frozen=True)
class Weight:
    """A parameter of a block.

    Attributes:
        name: Its name, with the numbers of its blocks: `layers.0-31.mlp.up.weight`.
        one: Its full name in the first of these blocks.
        count: How many blocks have it.
        shape: Its unsharded shape.
        layer: The layer style of its module.
        entry: Its placement; None if replicated.
        item: The step of the block that reads it.
        itemsize: Bytes of an element; of a quantized parameter, with its scales.
    """

    name: str
    one: str
    count: int
    shape: tuple[int, ...]
    layer: str
    entry: ParameterPlan | None
    item: DrawnItem
    itemsize: float

    @property
    def id(self) -> str:
        """Return its name as the id of an HTML element."""
        return "".join(c if c.isalnum() else "-" for c in self.name)

    @cached_property
    def placement(self) -> Placement:
        """Return its placement on the ranks."""
        return parse(self.entry.placement if self.entry else ", ".join(map(str, self.shape)))

    @property
    def is_split(self) -> bool:
        """Return whether it is sharded."""
        return any(map(is_split, self.placement.dims))

    @property
    def unsharded_bytes(self) -> int:
        """Return the unsharded bytes of one such parameter."""
        return round(prod(self.shape) * self.itemsize)

    def bytes_at(self, at: Coords) -> int:
        """Return the bytes of one such parameter on the rank at `at`."""
        return round(prod(n or 0 for n in self.placement.local_shape(at)) * self.itemsize)


class Weights:
    """All parameters of a plan.

    Attributes:
        found: (block number, step number) -> the parameters that the step reads, largest first.
        rest: Parameters that no step reads.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        stored = grouped((name.rpartition(".")[0], name) for name in plan.model.parameters)
        self.found: dict[tuple[int, int], list[Weight]] = {}
        done: set[tuple[int, str]] = set()
        for b, block in enumerate(plan.drawing):
            first = first_of(block.modules[0])
            for i, item in enumerate(block.items):
                owner = ".".join(filter(None, (first, item.module)))
                if item.slot is not None or item.blocks or not item.ops or (b, owner) in done:
                    continue
                done.add((b, owner))
                names = stored.get(owner) or stored.get(pattern(owner), ())
                keys = [name.rpartition(".")[2] for name in names]
                row = [
                    self._weight(f"{owner}.{key}".lstrip("."), block.modules, item, block.count)
                    for key in keys
                ]
                row.sort(key=lambda w: (-prod(w.shape), not w.name.endswith("weight")))
                self.found[b, i] = row
        read = {pattern(w.one) for row in self.found.values() for w in row}
        left = (name for name in plan.model.parameters if pattern(name) not in read)
        self.rest = [self._weight(name, [""], DrawnItem(), 1) for name in left]

    def __iter__(self) -> Iterator[Weight]:
        for row in self.found.values():
            yield from row
        yield from self.rest

    def _weight(self, one: str, blocks: list[str], item: DrawnItem, count: int) -> Weight:
        owner, _, key = one.rpartition(".")
        module = self.plan.module(owner) or ModulePlan()
        first, load = first_of(blocks[0]), self.plan.workload
        bits = lookup(load.quantized.bits, one) if load.quantized else None
        return Weight(
            name=", ".join(blocks) + one.removeprefix(first) if first else one,
            one=one,
            count=count,
            shape=tuple(lookup(self.plan.model.parameters, one) or ()),
            layer=module.layer,
            entry=module.parameters.get(key),
            item=item,
            itemsize=bits / 8 if bits else ITEMSIZE.get(load.dtype, 2),
        )


def first_of(modules: str) -> str:
    """Return the name of the first block in a range such as `layers.0-31`."""
    stack, dot, number = modules.rpartition(".")
    return f"{stack}{dot}{number.partition('-')[0]}" if number[:1].isdigit() else modules
