"""Poses the problem of a hand-written table: its styles become factors of the planner's problem.

Parameters are sharded as the styles say, or replicated, and tensors change their placement only at
the modules that the table names, as their styles do it. If no solution remains, the table is wrong
by our rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.errors import InfeasibleError
from shardwright.planner.contract.names import grouped, made_once, prefixes
from shardwright.planner.graph.axes import ATOM, PRODUCT, Dim, find
from shardwright.planner.graph.graph import Boundary, Graph, Use
from shardwright.planner.problem.builder import CostFunctionNetwork
from shardwright.planner.problem.pins import Pin
from shardwright.planner.problem.tp_moves import COPIED, SAME, SUMMED_BACK, Moves
from shardwright.planner.problem.tp_plan import Rules, Style, split_dim, style_of
from shardwright.planner.strategies.obstacles import obstacle
from shardwright.planner.strategies.state import State


class Unsplittable(InfeasibleError):
    """A style cannot shard a parameter, whatever the other styles are.

    `on_an_edge` says that a plain shard would begin and end where the code splits the dim up, so
    that only our rules do not know it: 4 heads of 2 key heads on 4 ranks.
    """

    def __init__(
        self, text: str, fqn: str = "", stored: str = "", dim: int = 0, on_an_edge: bool = False
    ) -> None:
        super().__init__(text)
        self.fqn, self.stored, self.dim, self.on_an_edge = fqn, stored, dim, on_an_edge


def follow_table(graph: Graph, network: CostFunctionNetwork, rules: Rules) -> dict[str, Pin]:
    """Restrict a network to what a table's rules do, and return the pin of each stored tensor.

    Raises:
        UsageError: a style is unknown.
        Unsplittable: a style is impossible, whatever the other styles are.
    """
    styles = {name: style_of(s) for name, s in (rules.modules | rules.parameters).items()}
    return _Table(graph, network, rules, styles).add()


@dataclass(frozen=True)
class _Table:
    """The restrictions that a table's styles put on a network."""

    graph: Graph
    network: CostFunctionNetwork
    rules: Rules
    styles: Mapping[str, Style]
    _moves: dict[tuple[int, int, int], Moves] = field(default_factory=dict)

    def add(self) -> dict[str, Pin]:
        """Add all restrictions, and return the pin of each stored tensor."""
        wanted = self._stored()
        for use in self.graph.uses:
            moves = self._of_use(use)
            label = f"{'summed' if SAME not in moves else 'unsummed'} {use.fqn}"
            if wanted[use.stored].dim is not None:
                moves = (SAME,)
            self._allow(label, use.stored, use.used, [(m,) for m in moves])
        for boundary in self.graph.boundaries:
            moves = self._of_boundary(boundary)
            kind = "kept" if all(m == SAME for m in moves) else "styled"
            label = f"{kind} {boundary.module} {boundary.side} {boundary.slot}"
            options = [moves]
            if COPIED in moves and _parent(boundary.module) in self._summing_back:
                options.append(tuple(m for m in moves if m != COPIED))
            self._allow(label, boundary.source, boundary.target, options)
        return wanted

    def _allow(self, label: str, source: str, target: str, options: list[tuple[str, ...]]) -> None:
        """Allow what one of several sequences of moves does."""
        states, last = self.network.states, len(self.graph.tensors[source].shape) - 1
        domains = states.domain(source), states.domain(target)
        at = id(domains[0]), id(domains[1]), last
        every = [*dict.fromkeys((*domains[0], *domains[1]))]
        move = made_once(self._moves, at, lambda: Moves(every, states.sub.full, last)).after
        after = {s: set[State]().union(*(move(s, o) for o in options)) for s in domains[0]}
        self.network.allow_pairs(label, source, target, lambda s, t: t in after[s])

    @cached_property
    def _summing_back(self) -> frozenset[str]:
        """Modules in which a style sums the gradient of an output.

        What other modules sum in them, this one style sums: see `STYLES`.
        """
        return frozenset(
            _parent(m) for m in self.rules.modules if self.styles[m].leaves == SUMMED_BACK
        )

    def _of_use(self, use: Use) -> tuple[str, ...]:
        """Return the moves, each of them possible, of a replicated parameter that is read."""
        module = _parent(use.fqn)
        style = self.styles.get(use.fqn) or self.styles.get(module)
        if style is None and _parent(module) in self._summing_back:
            return SAME, COPIED
        return (SAME if style is None else style.uses,)

    def _of_boundary(self, boundary: Boundary) -> tuple[str, ...]:
        """Return the moves of the modules that a tensor leaves and enters at a boundary, in order.

        The graph has one boundary for several in a row; the others follow from its readers.
        """
        inside = self._readers.get(boundary.target, [""])
        shared = set.intersection(*(set(prefixes(m)[1:]) for m in inside))
        here = set(prefixes(boundary.module)[1:])
        entered = shared - here
        left = here - shared if boundary.side == "out" else set()
        if boundary.side == "in":
            entered.add(boundary.module)
        out = [self.styles[m].leaves for m in sorted(left, key=len)[::-1] if m in self.styles]
        into = [self.styles[m].enters for m in sorted(entered, key=len) if m in self.styles]
        return (*out, *into) or (SAME,)

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        """Map each tensor to the modules that read it, in ops or at boundaries."""
        in_ops = ((name, op.module) for op in self.graph.ops for name in op.inputs)
        at_boundaries = (
            (b.source, b.module if b.side == "out" else _parent(b.module))
            for b in self.graph.boundaries
        )
        return grouped((*in_ops, *at_boundaries))

    def _stored(self) -> dict[str, Pin]:
        graph, states = self.graph, self.network.states
        wanted: dict[str, Pin] = {}
        for use in sorted(graph.uses, key=lambda u: u.fqn not in self.styles):
            style, shape = self.styles.get(use.fqn), graph.tensors[use.stored].shape
            dim = None if style is None else split_dim(style, use.fqn, len(shape))
            pin = wanted.setdefault(use.stored, Pin(use.fqn, dim))
            if style is None or use.fqn == pin.name:
                continue
            if pin.dim != dim:
                raise Unsplittable(f"{pin.name} and {use.fqn} are tied, but not sharded alike")
        refused = []
        for stored, pin in wanted.items():
            allows = self._allows(stored, pin)
            if not any(allows(s) for s in states.domain(stored)):
                refused.append(self._refusal(stored, pin))
            else:
                self.network.allow(f"pin {stored}", stored, allows)
        if refused:
            raise min(refused, key=lambda error: error.on_an_edge)
        return wanted

    def _refusal(self, stored: str, pin: Pin) -> Unsplittable:
        """Return the error that says why a style cannot shard a parameter."""
        graph, states, at = self.graph, self.network.states, pin.dim or 0
        why = obstacle(graph, states, stored, at)
        if any(pin.allows(s) for s in states.domain(stored)):
            why = "its shards would not be those that the code splits up"
        style = self.rules.parameters[pin.name]
        text = f"{pin.name} cannot be split by style '{style}': {why}"
        edge = ends_on_an_edge(states.axes.dims[stored][at], states.ranks)
        return Unsplittable(text, pin.name, stored, at, edge)

    def _allows(self, stored: str, pin: Pin) -> Callable[[State], bool]:
        """Return a test for states that are a plain Shard: equal, consecutive rows per rank.

        If the output is gathered at once, any sharding of the rows gives the same result.
        """
        style = self.styles.get(pin.name)
        owner = self.styles.get(_parent(pin.name))
        if style is None or pin.dim is None or (owner is not None and owner.cuts_rows):
            return pin.allows
        dim = self.network.states.axes.dims[stored][pin.dim]
        ranks = self.network.states.sub.full
        atoms = {(atom, ranks) for atom in leading(dim, style.parts)}
        return lambda s: pin.allows(s) and {shard[1:] for shard in s.shards} == atoms


def leading(dim: Dim, parts: int) -> set[int]:
    """Return the major axis of a dim, or of each of its equal parts; empty if there is none.

    A shard of consecutive rows splits this axis.
    """
    dim = find(dim)
    while dim.kind == PRODUCT:
        dim = find(next(c for c in dim.children if find(c).size > 1))
    if dim.kind == ATOM:
        return {dim.id} if parts == 1 else set()
    terms = [t for t in dim.children if find(t).size > 1]
    if parts != len(terms) or len({find(t).size for t in terms}) > 1:
        return set()
    return set().union(*(leading(t, 1) for t in terms))


def ends_on_an_edge(dim: Dim, ranks: int) -> bool:
    """Whether equal, consecutive parts of a product begin and end between its major axes."""
    parts = 1
    for factor in find(dim).children[:-1] if find(dim).kind == PRODUCT else ():
        if find(factor).kind != ATOM:
            return False
        parts *= find(factor).size
        if parts % ranks == 0:
            return True
    return False


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
