"""The traced model as the planner sees it: tensors, ops, and boundaries between modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

from shardwright.planner.contract.names import made_once
from shardwright.planner.graph.marks import Marks
from shardwright.rules.call import OpCall

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the traced model, with its unsharded shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    bits: Fraction | None = None
    """Of a quantized parameter: the bits of an element as it is stored, with its scales."""

    def stored_bytes(self, elements: int) -> int:
        """Return the bytes of that many elements of a stored tensor."""
        if self.bits is None:
            return elements * self.dtype.itemsize
        return -(-elements * self.bits.numerator // (8 * self.bits.denominator))


class Op(NamedTuple):
    """One ATen call; `inputs` and `outputs` are tensor names in the order of the call.

    `literals` names the slice bounds that the model's code states as bare numbers. `traced_call` is
    the number of the traced call that recorded the op.
    """

    name: str
    call: OpCall
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str
    source: str
    literals: frozenset[str] = frozenset()
    traced_call: int = 0


class Boundary(NamedTuple):
    """A tensor that enters or leaves a module: the only places where tensors may be resharded.

    `source` is the tensor before the reshard, `target` the tensor after it.
    """

    module: str
    side: str  # "in", "out", ATTENDS or KEEPS
    slot: str
    source: str
    target: str
    has_parameters: bool = True
    traced_call: int = 0


Item = Op | Boundary


def made_by(item: Item) -> tuple[str, ...]:
    """Return the tensors that an op or a boundary makes."""
    return item.outputs if isinstance(item, Op) else (item.target,)


def taken_by(item: Item) -> tuple[str, ...]:
    """Return the tensors that an op or a boundary takes."""
    return item.inputs if isinstance(item, Op) else (item.source,)


def crossed(boundary: Boundary, around: Boundary | None) -> tuple[str, ...]:
    """Return the tensors whose states determine the reshard at a boundary.

    `around` is the boundary just outside of it (`Graph.outer`), by which the tensor came in.
    """
    return (*([around.source] if around else []), boundary.source, boundary.target)


class Slot(NamedTuple):
    """An input or output position of a module. All calls of the module reshard it in the same way.

    Tensors with a different `ndim` form a separate slot, because the runtime can tell them apart.
    """

    module: str
    side: str
    slot: str
    ndim: int


class Passing(NamedTuple):
    """An integer or complex tensor that enters or leaves a module. It is never resharded there.

    `name` is None if nothing reads the tensor. It is then absent from the graph, and `made_of`
    names the graph tensors that it was computed from.
    """

    slot: Slot
    name: str | None
    made_of: frozenset[str]


ATTENDS = "attention"
"""Side of a tensor that a module passes to attention: not a module boundary, but handled as one."""

KEEPS = "keeps"
"""Side of a tensor that a module sets as its attribute: users may read it after the call."""


@dataclass(frozen=True)
class Use:
    """A parameter or buffer: the stored tensor, and the tensor that its module sees.

    Tied parameters share `stored`.
    """

    fqn: str
    stored: str
    used: str
    is_buffer: bool


EQUAL = "equal"
"""The bound of a `SizeArgument` that must be 0 on each rank."""


@dataclass(frozen=True)
class SizeArgument:
    """An integer argument computed from attributes, and the tensor dim whose size it must equal.

    `expression` is a nested tuple: ("attribute", module, name, value), ("constant", n),
    ("read", n, number, dim) for a size read off a tensor, or (operator, left, right).
    For a slice bound, `tensor` is the result of the slice and `bound` says start or stop.
    With the bound EQUAL, the expression is the difference of two integers that code found equal;
    `tensor` is a tensor near that code.
    `place` is the position among the sizes of the call. `caller` (see `trace/sizes/callers.py`)
    is the call in the module's own code, if it is known.
    """

    expression: tuple[Any, ...]
    tensor: str
    dim: int
    bound: str = ""
    place: int = -1
    caller: Any = None


class Block(NamedTuple):
    """One of several copies of a block. Its ops are `graph.ops[start:stop]`.

    Copies of one traced block in one traced call share `kind`. `tensors` names every tensor that
    the ops take or make, in the same order for all copies.
    """

    kind: int
    tensors: tuple[str, ...]
    start: int
    stop: int


@dataclass(kw_only=True)
class RunFacts:
    """What is known of the traced calls beside tensors and ops."""

    returned_slots: list[list[str]] = field(default_factory=list)
    """For each traced call, the slots of the tensors that it returns."""

    cache_classes: list[dict[str, str]] = field(default_factory=list)
    """For each traced call: argument -> class of the state (the cache) that it takes."""

    cache_arguments: list[list[str]] = field(default_factory=list)
    """For each traced call, the arguments that are its state."""

    flags: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """Module that was called -> flag -> the values that the flag had."""

    other_arguments: dict[str, set[str]] = field(default_factory=dict)
    """Module that was called -> arguments that had neither tensors nor flags: lists, sizes."""

    flags_from_data: set[str] = field(default_factory=set)
    """Modules whose flags may depend on data: code that reads values calls them."""

    leaves_attributes: bool = False
    """Whether runs change attributes of modules."""

    reads_left_attributes: bool = False
    """Whether code reads attributes that an earlier run left."""

    draws: bool = False
    """Whether the model draws random numbers in eval mode too."""


@dataclass
class Graph(RunFacts):
    """A traced model: tensors, ops and boundaries in execution order."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)
    """The inputs that no caller gives: code makes them of plain numbers."""

    outputs: list[str] = field(default_factory=list)
    marks: Marks = field(default_factory=Marks)
    """Further facts about tensors."""

    stand_ins: bool = True
    """Whether the trace replaced numbers that depend on data by stand-ins."""

    branch_paths: tuple[tuple[int, tuple[bool, ...]], ...] = ()
    """The run and branch answers of each traced call (see `trace/data_queries/branch_paths.py`)."""

    skips: bool = False
    """Whether conditional code was traced as if it always ran."""

    holds_in_training: bool = False
    """Whether the runs also hold for training mode."""

    stateful: frozenset[str] = frozenset()
    """Modules that may do something else if they are called again with the same arguments."""

    asks_autocast: bool = False
    """Whether code reads the autocast mode, and may compute something else under autocast."""

    numbers: frozenset[str] = frozenset()
    """Number arguments of the model that may have any value."""

    lengths: dict[int, str] = field(default_factory=dict)
    """Lengths of the example inputs that a workload changes -> "batch" or "seq"."""

    unpriced: frozenset[int] = frozenset()
    """Traced calls without a cost: they only constrain the plan."""

    sizes: list[SizeArgument] = field(default_factory=list)
    equal: list[SizeArgument] = field(default_factory=list)
    """Integers that code compared, or used as one key of a cache: see `SizeArgument`."""

    length_tests: list[Any] = field(default_factory=list)
    """Comparisons of lengths (`trace/sizes/length_tests.py`) by which code decides."""

    asked_dims: dict[str, str] = field(default_factory=dict)
    """Tensor of whose number of dims code asks -> the place in the code."""

    reads: dict[int, str] = field(default_factory=dict)
    """Number in a "read" expression -> tensor whose size was read."""

    pinned: set[tuple[str, str]] = field(default_factory=set)
    """(module, attribute) pairs whose values the plan must not change."""

    untraced: frozenset[str] = frozenset()
    """Modules that the graph represents by one op each."""

    watched: list[tuple[str, str, str]] = field(default_factory=list)
    """(module, slot, tensor) of each module output, in the order of the calls."""

    crossed: list[Boundary] = field(default_factory=list)
    """Every floating tensor that enters or leaves a module, in the order of the calls.

    Unlike `boundaries` this includes places where the tensor is never resharded.
    """

    passed: list[tuple[int, Passing]] = field(default_factory=list)
    """Integer and complex tensors that cross, each with the number of `crossed` entries before it.
    """

    alike: dict[str, str] = field(default_factory=dict)
    """Tensor of a folded block -> corresponding tensor in the first block of its kind.

    Both have the same placement.
    """

    mixtures: dict[str, Any] = field(default_factory=dict)
    """Module -> its `Mixture` (`planner/experts/`), if its experts are spread over ranks."""

    unspread: dict[str, str] = field(default_factory=dict)
    """Module that looks like a mixture -> why its experts are not spread over ranks."""

    blocks: list[Block] = field(default_factory=list)
    """In an unfolded graph: the block copies, in the order of their ops."""

    counts: dict[str, int] = field(default_factory=dict)
    """Op or tensor of a folded block -> number of copies in the unfolded model."""

    found: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `once_a_graph` found."""

    def times(self, name: str) -> int:
        """Return the number of copies of the op or tensor `name` in the unfolded model."""
        return self.counts.get(name, 1)

    def priced(self, item: Op | Boundary) -> bool:
        """Return whether the plan pays for an op or a reshard."""
        return item.traced_call not in self.unpriced

    def representative(self, name: str) -> str:
        """Return the tensor that decides the placement of `name`: itself, or the one in `alike`."""
        return self.alike.get(name, name)

    def outer(self) -> dict[str, Boundary]:
        """Map the target of an inner input boundary to the input boundary just outside of it.

        The inner boundary may reshard from the placement before the outer boundary. Boundaries
        whose reshard depends on the number of dims of the tensor are left out.
        """
        entered = {b.target: b for b in self.boundaries if b.side == "in"}
        inner = [b for b in entered.values() if b.source in entered]
        at = {b[:3] for b in inner}  # module, side, slot
        several = Counter(
            slot[:3] for slot in {self.slot(b) for b in self.boundaries if b[:3] in at}
        )
        return {b.target: entered[b.source] for b in inner if several[b[:3]] == 1}

    def slot(self, boundary: Boundary) -> Slot:
        """Return the slot of a boundary. All tensors of a slot are resharded in the same way."""
        ndim = len(self.tensors[boundary.source].shape)
        return Slot(boundary.module, boundary.side, boundary.slot, ndim)

    def readings(self) -> Counter[str]:
        """Count how often priced ops of the unfolded model read each tensor."""
        ops = [op for op in self.ops if self.priced(op)]
        if not self.counts:
            return Counter(n for op in ops for n in {*op.inputs})
        out: Counter[str] = Counter()
        for op in ops:
            for name in {*op.inputs}:
                out[name] += max((self.times(n) for n in op.outputs), default=1)
        return out

    def first_run(self) -> Graph:
        """Return the graph of the first traced call only, with all parameters and buffers.

        Returns this graph itself if it has no other call.
        """
        return self._only(lambda item: not item.traced_call)

    def priced_runs(self) -> Graph:
        """Return the graph of the priced runs only, with all parameters and buffers."""
        return self._only(self.priced)

    def _only(self, kept: Callable[[Op | Boundary], bool]) -> Graph:
        if all(kept(item) for item in (*self.ops, *self.boundaries)):
            return self
        ops = [op for op in self.ops if kept(op)]
        boundaries = [b for b in self.boundaries if kept(b)]
        seen = {n for op in ops for n in (*op.inputs, *op.outputs)}
        seen |= {n for b in boundaries for n in (b.source, b.target)}
        seen |= {n for u in self.uses for n in (u.stored, u.used)}
        return replace(
            self,
            tensors={n: t for n, t in self.tensors.items() if n in seen},
            ops=ops,
            boundaries=boundaries,
            inputs=[n for n in self.inputs if n in seen],
            outputs=[n for n in self.outputs if n in seen],
            marks=self.marks.kept(seen),
            watched=[each for each in self.watched if each[-1] in seen],
            blocks=[],
        )

    def timeline(self) -> list[Item]:
        """Return ops and boundaries in execution order."""
        items: list[Item] = [*self.boundaries, *self.ops]
        made = {name: item for item in items for name in made_by(item)}
        found = (made.get(name) for name in self.tensors)
        return list({id(item): item for item in found if item is not None}.values())

    def copied_for_folding(self) -> Graph:
        """Return a graph that can be folded while this one stays as it is."""
        alike, counts = dict(self.alike), dict(self.counts)
        return replace(self, alike=alike, counts=counts, marks=replace(self.marks))

    def producers(self) -> dict[str, Op]:
        """Map each tensor name to the op that makes it."""
        return {out: op for op in self.ops for out in op.outputs}


def once_a_graph(find: Callable[Concatenate[Graph, P], T]) -> Callable[Concatenate[Graph, P], T]:
    """Make a function of a graph that no longer changes find its answer once, for all meshes."""

    @wraps(find)
    def known(graph: Graph, *args: P.args, **kwargs: P.kwargs) -> T:
        at = find, args, *kwargs.items()
        return made_once(graph.found, at, lambda: find(graph, *args, **kwargs))

    return known
