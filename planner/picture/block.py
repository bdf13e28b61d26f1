"""The drawing of a block: what it does from the top down, how tensors lie, what is sent where."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from shardwright.planner.contract.plan_figures import DrawnBlock, DrawnItem, Phase
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.glyph import glyph
from shardwright.planner.picture.layout import Node, place
from shardwright.planner.picture.palette import Palette
from shardwright.planner.picture.svg import LETTER, drawing, fitted, tag
from shardwright.planner.picture.weights import Weight
from shardwright.planner.picture.words import LIES, kinds, label, lies, short
from shardwright.planner.units import human_bytes, human_time

BOX, HIGH, SHEET = 150.0, 44.0, 28.0
"""Width and height of a box with a weight, and the size of its sheet."""
FLAT = 28.0
DIAMOND = 10.0
DASH = 5
"""Length of a stripe of an edge."""
OUT = 36.0
"""Room beside what leaves the block and is not its last."""


@dataclass(frozen=True)
class Ids:
    """Names of parts of the page: of a plan's weights and blocks."""

    prefix: str

    def weight(self, weight: Weight) -> str:
        """Of the close-up of a weight."""
        plain = "".join(c if c.isalnum() else "-" for c in weight.name)
        return f"{self.prefix}-w-{plain}"

    def block(self, number: int | str) -> str:
        """Of a block."""
        return f"{self.prefix}-block-{number}"


class BlockDrawing:
    """Draws one block of a plan."""

    def __init__(
        self, plan: Plan, number: int, weights: dict[tuple[int, int], list[Weight]],
        palette: Palette, ids: Ids, phase: Phase | None,
    ) -> None:  # fmt: skip
        self.phase: Phase | None = phase
        self.plan, self.block, self.number = plan, plan.drawing[number], number
        self.weights, self.palette, self.ids = weights, palette, ids
        self.trains = "train" in plan.workload.phases

    def draw(self) -> Markup:
        """The whole of it."""
        items = self.block.items
        shown = {str(i): item for i, item in enumerate(items) if not is_aside(item)}
        slots = dict.fromkeys(
            k for item in shown.values() for k in sorted(item.takes) if k not in shown
        )
        nodes = {f"in {slot}": self._end(slot) for slot in slots}
        takes: dict[str, list[str]] = {}
        edges: dict[tuple[str, str], str] = {}
        for key, item in shown.items():
            nodes[key] = self._node(int(key), item)
            inner = sorted((k for k in item.takes if k in shown), key=int)
            sources = [(f"in {k}", item.takes[k]) for k in slots if k in item.takes]
            sources += [(k, item.takes[k]) for k in inner]
            takes[key] = [k for k, _ in sources]
            edges |= {(k, key): text for k, text in sources}
        for key, text in self.block.gives.items():
            if key in shown:
                self._leaves(key, text, shown, nodes, takes, edges)
        layout = place(nodes, takes)
        parts = [self._edge(layout.paths[ends], text) for ends, text in edges.items()]
        parts += [
            part
            for key, text in self.block.gives.items()
            if key in shown and key != [*shown][-1]
            for part in self._aside(nodes[key], text)
        ]
        parts += [self._text(nodes[f"in {slot}"], slot) for slot in slots]
        parts += [self._item(nodes[key], int(key), item) for key, item in shown.items()]
        return drawing(layout.width, layout.height, f"Drawing of {title(self.block)}", parts)

    def _leaves(self, key, text, shown, nodes, takes, edges) -> None:  # noqa: ANN001
        """What leaves the block: from what runs last, down; else it is said beside."""
        if key == [*shown][-1]:
            nodes[f"out {key}"] = Node(4, 4, 4)
            takes[f"out {key}"] = [key]
            edges[key, f"out {key}"] = text
        else:
            nodes[key].right += OUT

    # --- how much room each takes

    def _end(self, slot: str) -> Node:
        half = len(slot) * 11 * LETTER / 2 + 4
        return Node(half, half, 16)

    def _node(self, number: int, item: DrawnItem) -> Node:
        if item.slot is not None:
            text = self._sent(item)
            wide = max((len(t) for t in text), default=0) * 12.5 * LETTER
            return Node(DIAMOND + 2, DIAMOND + 8 + wide if text else DIAMOND, 22 if text else 8)
        if item.blocks:
            return Node(BOX / 2 + 6, BOX / 2 + 12, HIGH + 8)
        if self.weights.get((self.number, number)):
            flat = self._is_flat(number)
            return Node(BOX / 2, BOX / 2, FLAT if flat else HIGH)
        text = label(item)
        if len(text) == 1:
            return Node(12, 12, 24)
        half = max(len(text) * 12 * LETTER / 2 + 12, 30)
        return Node(half, half, FLAT)

    def _is_flat(self, number: int) -> bool:
        return all(len(w.shape) < 2 and not w.is_split for w in self.weights[self.number, number])

    # --- what is drawn

    def _edge(self, path: str, placement: str) -> Markup:
        how = lies(placement)
        title = tag("title", f"{LIES[how]}: {placement}")
        if how != "sharded":
            return tag("g", title, tag("path", d=path, class_="hit"),
                       tag("path", d=path, class_=f"edge {how}"))  # fmt: skip
        some = self.palette.colours
        stripes = [some[0], some[len(some) // 2], some[-1]] if len(some) > 2 else some
        lines = [
            tag("path", d=path, class_="edge sharded", stroke=colour,
                stroke_dasharray=f"{DASH} {DASH * (len(stripes) - 1)}",
                stroke_dashoffset=-DASH * i)
            for i, colour in enumerate(stripes)
        ]  # fmt: skip
        return tag("g", title, tag("path", d=path, class_="hit"), *lines)

    def _aside(self, node: Node, placement: str) -> list[Markup]:
        """What leaves the block beside a node, which had room for that."""
        node.right -= OUT
        x = node.x + node.right
        line = self._edge(f"M{x:.1f} {node.y:.1f} h14", placement)
        return [line, tag("text", "out", x=x + 17, y=node.y + 4, class_="small")]

    def _text(self, node: Node, text: str) -> Markup:
        return tag("text", text, x=node.x, y=node.y + 4, class_="end")

    def _item(self, node: Node, number: int, item: DrawnItem) -> Markup:
        title = tag("title", self._told(item))
        if item.slot is not None:
            return tag("g", title, *self._mark(node, item), class_="change", tabindex=0)
        if item.blocks:
            return tag("g", title, self._stack(node, item))
        weights = self.weights.get((self.number, number))
        if weights:
            box = [title, *self._box(node, item, weights, self._is_flat(number))]
            return tag("a", box, href=f"#{self.ids.weight(weights[0])}", class_="weight")
        text = label(item)
        if len(text) == 1:
            shape = tag("circle", cx=node.x, cy=node.y, r=12.0, class_="op")
        else:
            shape = _rect(node, "op", FLAT / 2)
        words = tag(
            "text", text, x=node.x, y=node.y + 4, class_="sign" if len(text) == 1 else "mid"
        )
        return tag("g", title, shape, words, tabindex=0, class_="glue")

    def _box(self, node: Node, item: DrawnItem, weights: list[Weight], flat: bool) -> list[Markup]:
        left = node.x - node.left
        shape = _rect(node, "box", 5)
        name = short(item.module) or "model"
        if flat:
            text = fitted(name, BOX - 16)
            return [shape, tag("text", text, x=node.x, y=node.y + 4, class_="mid")]
        first = weights[0]
        sizes = first.placement.local_shape(self.palette.ranks[0])
        below = "×".join(map(str, sizes)) + (" each" if first.is_split else " whole")
        at = left + SHEET + 14
        room = BOX - SHEET - 17
        return [
            shape,
            glyph(first, self.palette, left + 7, node.y - SHEET / 2, SHEET),
            tag("text", fitted(name, room, 13.5), x=at, y=node.y - 3, class_="name"),
            tag("text", fitted(below, room, 11.5), x=at, y=node.y + 12, class_="small"),
        ]

    def _stack(self, node: Node, item: DrawnItem) -> Markup:
        count = sum(item.blocks.values())
        behind = [
            tag("rect", x=node.x - BOX / 2 + d, y=node.y - HIGH / 2 - d, width=BOX, height=HIGH,
                rx=5, class_="box")
            for d in (6.0, 3.0, 0.0)
        ]  # fmt: skip
        name = fitted(f"{item.module}", BOX - 20)
        spent = self._spent(item)
        inside = [
            *behind,
            tag("text", f"{name} × {count}", x=node.x, y=node.y - 3, class_="mid name"),
            tag("text", spent, x=node.x, y=node.y + 13, class_="mid small"),
        ]
        return tag("a", inside, href=f"#{self.ids.block(next(iter(item.blocks)))}", class_="stack")

    def _spent(self, item: DrawnItem) -> str:
        drawn = self.plan.drawing
        total = sum(n * block_ns(drawn, int(b), self.phase) for b, n in item.blocks.items())
        return f"{self.phase} {human_time(total)}" if self.phase else ""

    def _mark(self, node: Node, item: DrawnItem) -> list[Markup]:
        text = self._sent(item)
        forward = any(c.phase != "backward" for c in item.collectives)
        r = DIAMOND if text else 4.0
        corners = ((0, -r), (r, 0), (0, r), (-r, 0))
        points = " ".join(f"{node.x + dx:.1f},{node.y + dy:.1f}" for dx, dy in corners)
        kind = "sent" if forward else "back" if item.collectives else "local"
        parts = [tag("polygon", points=points, class_=f"mark {kind}")]
        for i, line in enumerate(text):
            y = node.y + 4 + (i - (len(text) - 1) / 2) * 13
            parts.append(
                tag("text", line, x=node.x + r + 6, y=y, class_="sent" if i == 0 else "small")
            )
        return parts

    def _sent(self, item: DrawnItem) -> list[str]:
        """What a collective is called and takes; nothing of one that is not priced."""
        ahead = [c for c in item.collectives if c.phase == "forward"]
        back = [c for c in item.collectives if c.phase == "backward"]
        if not ahead and not (back and self.trains):
            return []
        found = ahead or back
        words = " + ".join(c.kind.replace("_", "-") for c in found)
        size = human_bytes(sum(c.bytes for c in found))
        time = f" · {human_time(item.phase_ns[self.phase])}" if self.phase in item.phase_ns else ""
        return [words if ahead else f"{words}, backward", f"{size}{time}"]

    def _told(self, item: DrawnItem) -> str:
        """What is said of an item that is pointed at."""
        where = ".".join(filter(None, (self.block.modules[0], item.module))) or "the model"
        lines = [where]
        if item.slot is not None:
            side, _, slot = item.slot.partition(" ")
            lines[0] += f", {'what enters' if side == 'in' else 'what leaves'} {slot}".rstrip()
            for phase in ("forward", "backward", "decode"):
                if text := kinds(item.collectives, phase):
                    lines.append(f"{phase}: {text}")
        elif item.ops:
            lines.append(f"computes {', '.join(op.strip('_') for op in item.ops)}")
        if item.source:
            lines.append(item.source)
        lines += [f"{phase}: {human_time(ns)}" for phase, ns in item.phase_ns.items()]
        return "\n".join(lines)


def is_aside(item: DrawnItem) -> bool:
    """Whether an item is what a block does besides: nothing of it is drawn."""
    return not (item.ops or item.blocks or item.takes) and item.slot is None


def title(block: DrawnBlock) -> str:
    """What a block is called."""
    return ", ".join(filter(None, block.modules)) or "the model"


def block_ns(blocks: list[DrawnBlock], number: int, phase: Phase | None) -> int:
    """Nanoseconds of one block in a phase, with those within."""
    total = 0
    for item in blocks[number].items:
        total += item.phase_ns.get(phase, 0) if phase else 0
        total += sum(n * block_ns(blocks, int(b), phase) for b, n in item.blocks.items())
    return total


def _rect(node: Node, kind: str, radius: float) -> Markup:
    return tag(
        "rect", x=node.x - node.left, y=node.top, width=node.left + node.right,
        height=node.height, rx=radius, class_=kind,
    )  # fmt: skip
