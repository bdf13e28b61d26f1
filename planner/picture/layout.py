"""Where the nodes of a block stand, in rows from the top down, and how edges run between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GAP, ROW, LANE = 18.0, 24.0, 15.0
"""Between nodes of a row, between rows, between edges that run beside the rows."""


@dataclass(eq=False)
class Node:
    """Something to be placed: `left`, `right` and half of `height` around its middle.

    `x` and `y` are its middle, once it is placed.
    """

    left: float
    right: float
    height: float
    row: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def top(self) -> float:
        """Its upper end."""
        return self.y - self.height / 2

    @property
    def bottom(self) -> float:
        """Its lower end."""
        return self.y + self.height / 2


@dataclass
class Layout:
    """A drawing with everything in its place: its size, and the path of each edge."""

    width: float = 0.0
    height: float = 0.0
    paths: dict[tuple[str, str], str] = field(default_factory=dict)


def place(nodes: Mapping[str, Node], takes: Mapping[str, Sequence[str]]) -> Layout:
    """Place nodes, which are in an order in which each comes behind what it takes.

    Args:
        nodes: By name; they are given their places.
        takes: Name -> the names of those that edges come from.
    """
    rows = _rows(nodes, takes)
    y = 0.0
    for row in rows:
        height = max(nodes[name].height for name in row)
        for name in row:
            nodes[name].y = y + height / 2
        y += height + ROW
        _spread(row, nodes, takes)
    paths = _Routes(nodes, rows).paths(takes)
    left = min([n.x - n.left for n in nodes.values()] + paths.reach) - 8
    right = max([n.x + n.right for n in nodes.values()] + paths.reach) + 8
    for node in nodes.values():
        node.x -= left
    found = _Routes(nodes, rows).paths(takes)
    return Layout(right - left, y - ROW, found.texts)


def _rows(nodes: Mapping[str, Node], takes: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Each below all that it takes; what takes nothing, right above what takes it."""
    for name in nodes:
        nodes[name].row = 1 + max((nodes[n].row for n in takes.get(name, ())), default=-1)
    readers: dict[str, list[int]] = {}
    for name in nodes:
        for other in takes.get(name, ()):
            readers.setdefault(other, []).append(nodes[name].row)
    for name, node in nodes.items():
        if not takes.get(name) and name in readers:
            node.row = max(min(readers[name]) - 1, 0)
    rows: dict[int, list[str]] = {}
    for name, node in nodes.items():
        rows.setdefault(node.row, []).append(name)
    return [rows[n] for n in sorted(rows)]


def _spread(row: list[str], nodes: Mapping[str, Node], takes: Mapping[str, Sequence[str]]) -> None:
    """Place the nodes of a row side by side, each as near to below what it takes as can be."""

    def wanted(name: str) -> float:
        near = [nodes[n] for n in takes.get(name, ()) if nodes[n].row < nodes[name].row]
        last = max((n.row for n in near), default=0)
        at = [n.x for n in near if n.row == last]
        return sum(at) / len(at) if at else 0.0

    ordered = sorted(row, key=wanted)
    x, placed = 0.0, []
    for name in ordered:
        node = nodes[name]
        if placed:
            x += node.left
        placed.append(x)
        x += node.right + GAP
    shift = sum(wanted(n) - x for n, x in zip(ordered, placed, strict=True)) / len(row)
    for name, at in zip(ordered, placed, strict=True):
        nodes[name].x = at + shift


@dataclass
class _Found:
    texts: dict[tuple[str, str], str] = field(default_factory=dict)
    reach: list[float] = field(default_factory=list)


class _Routes:
    """Edges to the next row are curves; those further down run beside what is between."""

    def __init__(self, nodes: Mapping[str, Node], rows: list[list[str]]) -> None:
        self.nodes = nodes
        self.ends = {
            nodes[row[0]].row: (
                min(nodes[n].x - nodes[n].left for n in row),
                max(nodes[n].x + nodes[n].right for n in row),
            )
            for row in rows
        }
        self.taken: list[tuple[float, float, float]] = []
        """(x, from, to) of edges that run beside."""

    def paths(self, takes: Mapping[str, Sequence[str]]) -> _Found:
        found = _Found()
        for name, others in takes.items():
            for other in others:
                a, b = self.nodes[other], self.nodes[name]
                if b.row - a.row == 1 or not self._is_blocked(a, b):
                    found.texts[other, name] = _curve(a.x, a.bottom, b.x, b.top)
                    continue
                x = self._lane(a, b)
                found.reach.append(x)
                y, end = a.bottom + ROW, b.top - ROW
                found.texts[other, name] = (
                    f"{_curve(a.x, a.bottom, x, y)} L{x:.1f} {end:.1f} "
                    f"{_curve(x, end, b.x, b.top)[len(f'M{x:.1f} {end:.1f} ') :]}"
                )
        return found

    def _is_blocked(self, a: Node, b: Node) -> bool:
        between = (n for n in self.nodes.values() if a.row < n.row < b.row)
        low, high = min(a.x, b.x) - 6, max(a.x, b.x) + 6
        return any(n.x - n.left < high and n.x + n.right > low for n in between)

    def _lane(self, a: Node, b: Node) -> float:
        """Where an edge runs down: on the side that is nearer, beside those that are there."""
        rows = [self.ends[r] for r in self.ends if a.row < r < b.row]
        left, right = min(e[0] for e in rows) - LANE, max(e[1] for e in rows) + LANE
        middle = (a.x + b.x) / 2
        step = -LANE if middle - left <= right - middle else LANE
        x = left if step < 0 else right
        while any(abs(x - at) < LANE - 1 and a.y < end and start < b.y
                  for at, start, end in self.taken):  # fmt: skip
            x += step
        self.taken.append((x, a.y, b.y))
        return x


def _curve(x: float, y: float, to_x: float, to_y: float) -> str:
    """A path straight down at both ends."""
    middle = (y + to_y) / 2
    return f"M{x:.1f} {y:.1f} C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
