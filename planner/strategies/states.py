"""`States`: the domain of each tensor of a graph, which is every state it may have between ops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product

from shardwright.planner.contract.names import made_once
from shardwright.planner.graph.axes import Axes, Dim, factors_of, find, leaves_of
from shardwright.planner.graph.graph import Graph, once_a_graph
from shardwright.planner.strategies.cuts import covers, cut_at_run_time, cuts
from shardwright.planner.strategies.sequence import OpenSequence
from shardwright.planner.strategies.state import REPLICATED, Shards, State, looks_new, mask_of
from shardwright.planner.strategies.sub_axes import SubAxes, find_sub_axes, masks


@once_a_graph
def known_domains(*_: object) -> dict[tuple[State, ...], tuple[State, ...]]:
    """Return the table of the domains that were found with these axes, each by itself."""
    return {}


class States:
    """Domains of all tensors of a graph for a mesh dim of `ranks` ranks.

    Args:
        graph: The traced model.
        axes: Its refined dims.
        ranks: Size of the mesh dim. Shorter axes cannot be sharded over all of it.
        replaceable: Names of the lookup ops that the runtime can replace.
        forbidden: (tensor, split) pairs that failed a dry run.
        sequence: Sequence axes that may be sharded too.
        sub: The mesh dim as sub-axes; by default found from the parameters.
        shares: Whether copies of the model may share out parameters.
    """

    def __init__(
        self,
        graph: Graph,
        axes: Axes,
        ranks: int,
        replaceable: frozenset[str] = frozenset(),
        forbidden: frozenset[tuple[str, Shards]] = frozenset(),
        sequence: OpenSequence | None = None,
        sub: SubAxes | None = None,
        shares: bool = False,
    ) -> None:
        self.graph, self.axes, self.ranks = graph, axes, ranks
        self.replaceable, self.forbidden, self.sequence = replaceable, forbidden, sequence
        self.sub = find_sub_axes(graph, axes, ranks) if sub is None else sub
        self.shareable = frozenset(u.stored for u in graph.uses if shares and not u.is_buffer)
        self._domains: dict[str, tuple[State, ...]] = {}
        self._splits: dict[str, list[Shards]] = {}
        self._cuts: dict[tuple[int, frozenset[int]], list[frozenset[int]]] = {}
        self._splits_of_dims: dict[object, list[Shards]] = {}
        self._covered: dict[tuple[tuple[int | None, ...], Shards], int] = {}
        self._roots: dict[str, tuple[int | None, ...]] = {}
        self._known: dict[object, tuple[State, ...]] = {}

    @cached_property
    def allowed(self) -> dict[int, frozenset[int]]:
        """Mask -> axes that may be sharded over it: long enough, of parameters, of fixed size.

        The parts of a dim that is cut at a run-time size (the used and the unused rows of a table
        of positions) are of run-time size themselves.
        """
        fixed = {*self.of_own_experts}
        kinds = {id(dims): dims for dims in self.axes.dims.values()}  # equal blocks share dims
        for dim in {find(d).id: d for dims in kinds.values() for d in dims}.values():
            fixed |= cut_at_run_time(dim)
        out: dict[int, set[int]] = {self.sub.full: set()}
        for atom, found in masks(self.graph, self.axes, self.sub).items():
            for mask in found if atom not in fixed else ():
                out.setdefault(mask, set()).add(atom)
        return {mask: frozenset(atoms) for mask, atoms in out.items()}

    @cached_property
    def of_own_experts(self) -> frozenset[int]:
        """Axes of experts that the ranks of `ep` share out: tp shards none of these."""
        dims = (self.axes.dims[name][0] for name, _ in self.graph.marks.spread_experts)
        firsts = (next(factors_of(dim)) for dim in dims)
        return frozenset(a.id for first in firsts for a in leaves_of(first))

    @cached_property
    def _stored(self) -> frozenset[str]:
        return frozenset(u.stored for u in self.graph.uses)

    @cached_property
    def rigid(self) -> frozenset[str]:
        """Stored tensors that stay replicated: buffers, and parameters that the trace does not use.

        A buffer is small, and code may replace it, so modules take their part when they read it.
        A buffer that is written in place is stored as it is used. Nothing is known of an unused
        parameter.
        """
        read = {n for op in self.graph.ops for n in op.inputs}
        read |= {b.source for b in self.graph.boundaries}
        written = {used for _, used, _ in self.graph.marks.written}
        uses = (u for u in self.graph.uses if u.used in read)
        used = {u.stored for u in uses if not u.is_buffer or u.used in written}
        return self._stored - used

    def splits(self, name: str) -> list[Shards]:
        """Return every allowed sharding of tensor `name`, in a fixed order."""
        name = self.graph.representative(name)
        if name not in self._splits:
            fixed = self.graph.marks.fixed
            kept = tuple((name, i) in fixed for i in range(len(self.axes.dims[name])))
            at = self.dims(name), kept, name if self.sequence else ""
            every = made_once(self._splits_of_dims, at, lambda: self._all(name))
            self._splits[name] = [s for s in every if (name, s) not in self.forbidden]
        return self._splits[name]

    def dims(self, name: str) -> tuple[int | None, ...]:
        """Return the ids of a tensor's dims; None for dims that cannot be sharded."""
        if name not in self._roots:
            self._roots[name] = tuple(map(self.root, self.axes.dims[name]))
        return self._roots[name]

    def root(self, dim: Dim) -> int | None:
        """Return the id of a dim, shared by equal dims; None if it cannot be sharded."""
        found = find(dim).id
        return found if found in self._splittable else None

    @cached_property
    def _splittable(self) -> frozenset[int]:
        """Ids of the dims with an axis that may be sharded."""
        opened = self.sequence.axes if self.sequence else ()
        axes = frozenset[int]().union(*self.allowed.values(), opened)
        return frozenset(n for n, atoms in self.axes.atoms.items() if not axes.isdisjoint(atoms))

    def handed(self) -> dict[str, tuple[State, ...]]:
        """Return the states that each hidden state may have between blocks.

        Hidden states and their gradients are replicated, because users read them from blocks and
        pass them to blocks. With sequence parallelism they are sharded along the sequence.
        """
        out: dict[str, tuple[State, ...]] = {
            n: (REPLICATED,) for n in sorted(self.graph.marks.carried)
        }
        if self.sequence:
            for name, place in self.sequence.ends.items():
                if name in out:
                    out[name] = (*out[name], State(frozenset({(*place, self.sub.sequence)})))
            for name, place in self.sequence.handed.items():
                out[name] = (State(frozenset({(*place, self.sub.sequence)})),)
        return out

    def _all(self, name: str) -> list[Shards]:
        across = self._across(name)
        along = self._over(name, self.sub.along) if self.sub.along else []
        return [*across, *along, *(a | b for a, b in product(across, along))]

    def _across(self, name: str) -> list[Shards]:
        """Return every sharding of tensor `name` over tp."""
        by_mask = {mask: self._over(name, mask) for mask in self.allowed}
        out = by_mask.pop(self.sub.full)
        for part, major in by_mask.items():
            rest = self.sub.full & ~part
            if part & 1:  # heads over the major sub-axes, alone or with an axis inside of a head
                out += major
                out += [a | b for a in major for b in by_mask.get(rest, ())]
            elif not by_mask.get(rest):  # an axis inside of a head, in a tensor without heads
                out += major
        return out

    def writable(self, source: State, target: State) -> bool:
        """Whether code may write in place to the result of a redistribution.

        Autograd must see the result as a new tensor. A gather along a sequence may return a view.
        """
        gathered = mask_of(source.shards) & ~mask_of(target.shards) & self.sub.along
        return not gathered and not looks_new(source, target)

    def attends(self, slot: str, source: State, target: State) -> bool:
        """Whether an input `slot` of attention may be redistributed so: only over cp.

        The code around attention has computed with the sizes before that. So queries stay as they
        are, and keys and values arrive sharded like queries, or all unsharded.
        """
        if self._across_tp(source) != self._across_tp(target):
            return False
        if slot == "query":
            return source == target
        gathered = target.grad_partial & self.sub.along and slot in ("key", "value")
        return not gathered or bool(mask_of(source.shards) & self.sub.along)

    def _across_tp(self, state: State) -> State:
        tp = self.sub.full
        shards = frozenset(s for s in state.shards if s[2] & tp)
        return State(shards, state.partial & tp, state.grad_partial & tp)

    def _over(self, name: str, mask: int) -> list[Shards]:
        """Return every sharding of one dim of tensor `name` over the sub-axes of `mask`."""
        out: list[Shards] = []
        for i, dim in enumerate(self.axes.dims[name]):
            if (name, i) not in self.graph.marks.fixed:
                allowed = self.allowed.get(mask, frozenset())
                if self.sequence and mask == self.sub.sequence:
                    allowed |= self.sequence.open(name, i, dim)
                at = (find(dim).id, allowed)  # tensors share their dims
                found = made_once(self._cuts, at, lambda given=(dim, allowed): cuts(*given))
                out += [frozenset((i, a, mask) for a in cut) for cut in found]
        return out

    def covered(self, name: str, shards: Shards) -> int:
        """Return the mask of the sub-axes that shard every element of the tensor."""
        at = self.dims(name), shards
        if at not in self._covered:
            self._covered[at] = sum(
                bit
                for bit in self.sub.bits
                if any(
                    covers(dim, (a for d, a, m in shards if d == i and m & bit))
                    for i, dim in enumerate(self.axes.dims[name])
                )
            )
        return self._covered[at]

    def domain(self, name: str) -> tuple[State, ...]:
        """Return every state that tensor `name` can have between ops, in a fixed order.

        Equal domains are one object, for tensors and for meshes with the same axes.
        """
        name = self.graph.representative(name)
        return made_once(self._domains, name, lambda: self._make_domain(name))

    def _make_domain(self, name: str) -> tuple[State, ...]:
        fixed = name in self.graph.inputs or name in self.rigid
        split = () if fixed else tuple(self.splits(name))
        pends = not fixed and name not in self._stored and self.graph.tensors[name].differentiable
        at = pends, split, self.dims(name), name in self.shareable
        if at not in self._known:
            whole = (REPLICATED, *(State(s) for s in split))
            if name in self.shareable:
                whole = (*whole, *(s._replace(shared=True) for s in whole))
            found = tuple(self._pending(name, split)) if pends else whole
            self._known[at] = known_domains(self.graph, self.axes).setdefault(found, found)
        return self._known[at]

    def _pending(self, name: str, split: Sequence[Shards]) -> Iterator[State]:
        """Yield the states of a tensor whose value or gradient may be Partial."""
        out = [REPLICATED]
        for mask in self.allowed:  # Partial over all sub-axes, or over those that shard heads
            if mask and (mask == self.sub.full or mask & 1):
                out += [State(grad_partial=mask), State(partial=mask)]
        along = self.sub.along
        for shards in split:
            if mask_of(shards) & along:
                continue
            cut, covered = mask_of(shards), self.covered(name, shards)
            # If only a part of the tensor is sharded, the rest has a Partial gradient.
            rest, uncut = cut & ~covered, self.sub.full & ~cut
            subsets = (mask for mask in range(uncut + 1) if mask & ~uncut == 0)
            out += [State(shards, 0, rest | free) for free in subsets]
        yield from out
        if along:
            yield from self._along(out, split)

    def _along(self, across: Sequence[State], split: Iterable[Shards]) -> Iterator[State]:
        """Yield the states over cp for the states `across` tp: sharded, or with Partial gradient.

        Values are never Partial over cp: a tensor is gathered before a sum over the sequence.
        """
        along, known = self.sub.along, frozenset(split)
        yield from (s._replace(grad_partial=s.grad_partial | along) for s in across)
        for cut in (c for c in split if mask_of(c) == along):
            whole = (s._replace(shards=s.shards | cut) for s in across)
            yield from (s for s in whole if s.shards in known)
