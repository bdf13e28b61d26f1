"""The drawing of a plan: the items of each block in order, their placements and their costs.

The times and collectives of all items, each counted as often as its block is in the model, add up
to the prediction of the plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from shardwright.planner.contract.names import is_within, made_once, pattern
from shardwright.planner.contract.plan_figures import CollectiveCount, DrawnBlock, DrawnItem, Phase
from shardwright.planner.emit.attention_parts import parts
from shardwright.planner.emit.cost_breakdown import Cost, CostBreakdown
from shardwright.planner.emit.elements import Element, Elements
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.prediction import averages, count
from shardwright.planner.graph.graph import Boundary
from shardwright.planner.verify.recost import Bill

NAMED = 4
"""How many ops of an item are named. These are the slowest ones."""
UNNAMED = "input"
"""The slot name of a tensor that enters a block without one."""

Place = tuple[str, ...]
"""A block, by the names of the blocks around it and its own; the model is `("",)`."""


Copies = Mapping[str, Sequence[Sequence[int]]]
"""Path of a stack -> for each block of a graph, the numbers of the blocks that it represents."""


def drawing(
    layouts: Layouts, bill: Bill, short: tuple[Layouts, Bill, Copies] | None = None
) -> list[DrawnBlock]:
    """Return the drawing of a plan: the model itself, then each distinct block once.

    Args:
        layouts: Layouts of the unfolded graph.
        bill: Its bill.
        short: Layouts and bill of a graph with fewer copies of each block, which is faster to draw.
            It is not used if its figures do not add up: several blocks may read one parameter.
    """
    first = bill.first_run

    def drawn(layouts: Layouts, bill: Bill, copies: Copies) -> list[DrawnBlock]:
        elements = Elements(bill.first_run)
        costs = CostBreakdown(elements, bill.first_run, averages(first))
        return _Drawing(layouts, elements, costs, copies).blocks()

    if short is not None and _adds_up(found := drawn(*short), first):
        return found
    return drawn(layouts, bill, {})


def _adds_up(blocks: Sequence[DrawnBlock], bill: Bill) -> bool:
    """Whether the figures of all items are those of the bill, each as often as its block is."""
    ns, calls = Counter[Phase](), Counter[tuple[object, ...]]()
    for block in blocks:
        for item in block.items:
            for phase, n in item.phase_ns.items():
                ns[phase] += n * block.count
            calls.update(_sums(item.collectives, block.count))
    return ns == Counter(bill.times) and calls == _sums(count(bill))


def _sums(found: Iterable[CollectiveCount], times: int = 1) -> Counter[tuple[object, ...]]:
    out = Counter[tuple[object, ...]]()
    for c in found:
        out[c.phase, c.kind, c.hosts, c.way, "count"] += times * c.count
        out[c.phase, c.kind, c.hosts, c.way, "bytes"] += times * c.bytes
    return out


class _Drawing:
    def __init__(
        self, layouts: Layouts, elements: Elements, costs: CostBreakdown, copies: Copies
    ) -> None:
        self.layouts, self.elements, self.costs, self.copies = layouts, elements, costs, copies
        self.found, self.parts = elements.found, parts(elements)
        self._texts: dict[int, str] = {}
        self.runs: dict[Place, list[list[int]]] = {}
        """Place -> the elements of each of its items."""
        self.item: dict[tuple[Place, int], int] = {}
        """(place, element) -> number of the item there."""
        self.takes: defaultdict[tuple[Place, int], dict[str, str]] = defaultdict(dict)
        self.gives: defaultdict[Place, dict[str, str]] = defaultdict(dict)
        for place, inside in self._inside().items():
            keyed = [(self._key(place, n), n) for n in inside]
            self.runs[place] = [[n for _, n in run] for _, run in groupby(keyed, lambda k: k[0])]
            for i, run in enumerate(self.runs[place]):
                self.item |= {(place, n): i for n in run}
        for number, element in enumerate(self.found):
            for read in element.reads:
                self._join(number, element, *read)
        for name in elements.graph.outputs:
            made = elements.origin(name)
            if made is not None and made >= 0:
                chain, text = self.found[made].chain, self._text(name)
                for n in range(1, len(chain) + 1):
                    self._leave(chain[:n], made, text)

    def _inside(self) -> dict[Place, list[int]]:
        """Return the elements in each place, including those in blocks within it."""
        inside: dict[Place, list[int]] = {("",): []}
        for number, element in enumerate(self.found):
            for n in range(1, len(element.chain) + 1):
                inside.setdefault(element.chain[:n], []).append(number)
        return inside

    def _key(self, place: Place, number: int) -> object:
        """Return a key that elements of one item share: blocks of a stack in a row are one item."""
        within = self.found[number].chain[len(place) :]
        return within[0].rpartition(".")[0] if within else number

    # --- edges

    def _text(self, name: str) -> str:
        """Return the placement of a tensor as text. Copies share the object, which is cached."""
        placement = self.layouts.placement(name)
        return made_once(self._texts, id(placement), placement.__str__)

    def _join(
        self, number: int, element: Element, made: int | None, name: str, path: tuple[Boundary, ...]
    ) -> None:
        """Record that an element reads the output of another, or an input of the model."""
        text, chain = self._text(name), element.chain
        if made is None:
            shared = 0
        else:
            other = self.found[made].chain
            shared = next(
                (i for i, (a, b) in enumerate(zip(chain, other, strict=False)) if a != b),
                min(len(chain), len(other)),
            )
            place = chain[:shared]
            i, j = self.item[place, made], self.item[place, number]
            if i != j:
                _note(self.takes[place, j], str(i), text)
            for n in range(shared + 1, len(other) + 1):
                self._leave(other[:n], made, text)
        crossed = [*path, *([element.boundary] if element.boundary else [])]
        for n in range(shared + 1, len(chain) + 1):
            place = chain[:n]
            slot = next((b.slot for b in crossed if b.side == "in" and b.module == place[-1]), "")
            _note(self.takes[place, self.item[place, number]], slot or UNNAMED, text)

    def _leave(self, place: Place, made: int, text: str) -> None:
        _note(self.gives[place], str(self.item[place, made]), text)

    # --- blocks

    def blocks(self) -> list[DrawnBlock]:
        """Return the distinct blocks in the order of their first run, after enclosing blocks."""
        kinds: dict[Place, DrawnBlock] = {}
        alike: dict[str, list[Place]] = {}
        like: dict[str, Place] = {}
        for place in sorted(self.runs, key=lambda p: (-len(p), self._first(p))):
            items = [*self._items(place, like)]
            drawn = DrawnBlock(modules=[], count=0, items=items, gives=self.gives[place])
            key = f"{pattern(place[-1])} {drawn.model_dump_json()}"
            alike.setdefault(key, []).append(place)
            kinds[place] = drawn
            like[place[-1]] = alike[key][0]
        groups = sorted(alike.values(), key=lambda p: (self._first(p[0]), len(p[0])))
        groups = _outside_in(groups, kinds)
        numbers = {places[0][-1]: str(i) for i, places in enumerate(groups)}
        return [self._numbered(kinds[places[0]], places, numbers) for places in groups]

    def _first(self, place: Place) -> int:
        """Return the number of the element that runs first in a place."""
        return next((run[0] for run in self.runs[place]), 0)

    def _items(self, place: Place, like: dict[str, Place]) -> Iterator[DrawnItem]:
        """Yield the items of a block. Blocks within are named by the first block of their kind."""
        for i, run in enumerate(self.runs[place]):
            takes, first = self.takes[place, i], self.found[run[0]]
            if len(first.chain) > len(place):
                within = dict.fromkeys(self.found[n].chain[len(place)] for n in run)
                blocks = Counter[str]()
                for name in within:
                    blocks[like[name][-1]] += len(self._numbers(name)) // len(
                        self._numbers(place[-1])
                    )
                stack = _relative(first.chain[len(place)].rpartition(".")[0], place[-1])
                yield DrawnItem(module=stack, takes=takes, blocks=blocks)
            else:
                yield self._item(run[0], takes, place[-1])
        rest = self._aside(place)
        if rest.phase_ns or rest.collectives:
            yield rest

    def _item(self, number: int, takes: dict[str, str], block: str) -> DrawnItem:
        element, cost = self.found[number], self.costs.elements[number]
        slowest = sorted(cost.slowest.items(), key=lambda one: -one[1])
        return DrawnItem(
            module=_relative(element.module, block),
            slot=element.boundary and f"{element.boundary.side} {element.boundary.slot}".strip(),
            ops=[*dict.fromkeys(op for (op, _), ns in slowest if ns)][:NAMED],
            source=slowest[0][0][1] if slowest and not element.boundary else "",
            takes=takes,
            parts=self.parts.get(number, []),
            phase_ns={p: n for p, n in cost.ns.items() if n},
            collectives=cost.counted(),
        )

    def _numbered(
        self, block: DrawnBlock, places: list[Place], numbers: dict[str, str]
    ) -> DrawnBlock:
        """Return a block with the names of its copies, and blocks within it by their numbers."""
        items = [
            item.model_copy(update={"blocks": {numbers[k]: n for k, n in item.blocks.items()}})
            for item in block.items
        ]
        names = self._names([place[-1] for place in places])
        found = {"modules": [*_ranges(names)], "count": len(names), "items": items}
        return block.model_copy(update=found)

    def _names(self, drawn: list[str]) -> list[str]:
        """Return the names of all blocks of the model that some drawn ones represent, in order."""
        stacks = [*dict.fromkeys(self._stack(name) for name in drawn)]
        every = [
            (stacks.index(self._stack(name)), number, i)
            for i, name in enumerate(drawn)
            for number in self._numbers(name)
        ]
        return [_renumbered(drawn[i], stacks[at], number) for at, number, i in sorted(every)]

    def _stack(self, name: str) -> str:
        """Return the stack of the block that is or contains `name`; "" if no other is like it.

        A module that is itself a stack may also be a block of a stack that is traced in full.
        """
        inside = (path for path in self.copies if is_within(name, path) and name != path)
        return next(inside, "")

    def _numbers(self, name: str) -> Sequence[int]:
        """Return the numbers in that stack of the blocks that the drawn one represents."""
        stack = self._stack(name)
        return self.copies[stack][int(name[len(stack) + 1 :].partition(".")[0])] if stack else [0]

    def _aside(self, place: Place) -> DrawnItem:
        """Return the costs of a block, and of inner blocks not drawn, that belong to no element."""
        total = Cost(self.costs.device)
        for chain, cost in self.costs.aside.items():
            known = next(chain[:n] for n in range(len(chain), 0, -1) if chain[:n] in self.runs)
            if known == place:
                total.ns += cost.ns
                for phase, calls in cost.calls.items():
                    total.calls[phase] += calls
        ns: dict[Phase, int] = {p: n for p, n in total.ns.items() if n}
        return DrawnItem(phase_ns=ns, collectives=total.counted())


def _note(table: dict[str, str], key: str, text: str) -> None:
    """Record a placement. Of several tensors, one that is not replicated is preferred."""
    if key not in table or not ("@" in table[key] or "|" in table[key]):
        table[key] = text


def _renumbered(name: str, stack: str, number: int) -> str:
    """Return the name with another number of the block in `stack`."""
    if not stack:
        return name
    rest = name[len(stack) + 1 :].partition(".")
    return f"{stack}.{number}" + "".join(rest[1:])


def _relative(module: str, block: str) -> str:
    return module.removeprefix(block).removeprefix(".")


def _outside_in(groups: list[list[Place]], kinds: dict[Place, DrawnBlock]) -> list[list[Place]]:
    """Return groups of equal blocks in the same order, but each after all blocks that contain it.

    Different blocks may contain equal ones.
    """
    out, left = [], [*groups]
    while left:
        within = {name for g in left for item in kinds[g[0]].items for name in item.blocks}
        out.append(next(g for g in left if g[0][-1] not in within))
        left.remove(out[-1])
    return out


def _ranges(names: Iterable[str]) -> Iterator[str]:
    """Yield names, with consecutive numbers folded into one: `layers.0-31`."""
    rows: list[tuple[str, int, int]] = []
    for name in names:
        stack, _, number = name.rpartition(".")
        if not number.isdigit():
            yield name
            continue
        last = rows[-1] if rows else None
        if last and last[0] == stack and last[2] + 1 == int(number):
            rows[-1] = (stack, last[1], int(number))
        else:
            rows.append((stack, int(number), int(number)))
    for stack, first, last in rows:
        yield f"{stack}.{first}" + (f"-{last}" if last > first else "")
