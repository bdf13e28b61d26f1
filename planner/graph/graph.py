"""The traced model as the planner sees it: tensors, ops, and boundaries between modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from shardwright.planner.graph.marks import Marks
from shardwright.rules.call import OpCall


@dataclass(frozen=True)
class Tensor:
    """A value in the graph.

    `run_time` marks inputs of the model: their sizes vary, so their axes may not be split.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


class Op(NamedTuple):
    """One ATen call; `inputs` and `outputs` are tensor names in the order of the call.

    `literals` names the slice bounds that the model's code states as bare numbers; `traced_call` is
    the number of that which made it.
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
    """A tensor that enters or leaves a module, the only places where it may be resharded."""

    module: str
    side: str  # "in", "out", ATTENDS or KEEPS
    slot: str
    source: str
    target: str
    has_parameters: bool = True
    traced_call: int = 0


class Slot(NamedTuple):
    """Where a module takes or gives tensors; all of its calls change them in the same way.

    Those of another number of dims are told apart while the model runs: theirs is another change.
    """

    module: str
    side: str
    slot: str
    ndim: int


class Passing(NamedTuple):
    """A tensor of integers or complex numbers that enters or leaves a module: as it is, always.

    `name` is None where nobody takes it: then there is no such tensor in the graph, only those that
    it was `made_of`.
    """

    slot: Slot
    name: str | None
    made_of: frozenset[str]


ATTENDS = "attention"
"""The side of what a module gives to attention: no boundary of a module, but handled as one."""

KEEPS = "keeps"
"""The side of tensors that a module sets as its attributes: users may read them behind the call."""


@dataclass(frozen=True)
class Use:
    """A parameter or buffer as stored, and as its module sees it; tied ones share `stored`."""

    fqn: str
    stored: str
    used: str
    is_buffer: bool


EQUAL = "equal"
"""The bound of a `SizeArgument` that is 0 on each rank."""


@dataclass(frozen=True)
class SizeArgument:
    """An integer argument computed from attributes, and the tensor dim whose size it must be.

    `expression` is a nested tuple: ("attribute", module, name, value), ("constant", n),
    ("read", n, number, dim) for a size read off a tensor, or (operator, left, right).
    For a slice bound, `tensor` is the result of the slice and `bound` says start or stop.
    With the bound EQUAL it is the difference of two integers that code found equal, near `tensor`.
    `place` says which of the sizes it is of a call, and `caller` (of `trace/sizes/callers.py`)
    which call of a module's own code that was, where it is known.
    """

    expression: tuple[Any, ...]
    tensor: str
    dim: int
    bound: str = ""
    place: int = -1
    caller: Any = None


class Block(NamedTuple):
    """One of several copies of a block: ops number `start` to `stop` of the graph are its own.

    `kind` says what it is a copy of, and `tensors` all that its ops take or make, in one order for
    all copies.
    """

    kind: int
    tensors: tuple[str, ...]
    start: int
    stop: int


@dataclass
class Graph:
    """A whole model, in execution order."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    marks: Marks = field(default_factory=Marks)
    """What else is known of tensors."""

    stand_ins: bool = True
    """Whether numbers that only data has were replaced by stand-ins in the trace."""

    branch_paths: tuple[tuple[int, tuple[bool, ...]], ...] = ()
    """Which runs were made (see `trace/data_queries/branch_paths.py`)."""

    skips: bool = False
    """Whether code that a test may skip was traced as if it always ran."""

    trained: bool = False
    """Whether its runs do the same in training mode."""

    left: bool = False
    """Whether runs change attributes of modules."""

    kept: bool = False
    """Whether code goes on with what a run before it left there."""

    draws: bool = False
    """Whether random numbers are drawn in eval mode, too."""

    asks_autocast: bool = False
    """Whether code reads the autocast mode, and may compute something else under autocast."""

    numbers: frozenset[str] = frozenset()
    """Arguments of the model that are numbers of which any other would do."""

    flags: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    """Of each module that was called, its flags: the values that they had."""

    unpriced: frozenset[int] = frozenset()
    """Traced calls that cost nothing: they only constrain the plan."""

    sizes: list[SizeArgument] = field(default_factory=list)
    equal: list[SizeArgument] = field(default_factory=list)
    """Integers that code compared, or took for one key of a cache: see `SizeArgument`."""

    reads: dict[int, str] = field(default_factory=dict)
    """Number in a "read" expression -> the tensor whose size was read."""

    pinned: set[tuple[str, str]] = field(default_factory=set)
    """Attributes of modules, with their names, that must stay as they are."""

    untraced: frozenset[str] = frozenset()
    """Modules that stand in it as one op each."""

    watched: list[tuple[str, str, str]] = field(default_factory=list)
    """(module, slot, tensor) of every module output, in the order of the calls."""

    crossed: list[Boundary] = field(default_factory=list)
    """Every tensor that enters or leaves a module, in the order of the calls, those included that
    cannot change there."""

    places: list[str] = field(default_factory=list)
    """Of each of those, where the code of a model calls that module."""

    passed: list[tuple[int, Passing]] = field(default_factory=list)
    """Those that are not floating, each with the number of those in `crossed` before it."""

    given: list[list[str]] = field(default_factory=list)
    """Of each traced call, the slots of the tensors that it returns."""

    states: list[dict[str, str]] = field(default_factory=list)
    """Of each traced call, the classes of the state that it takes, by argument: of its cache."""

    taken: list[list[str]] = field(default_factory=list)
    """Of each traced call, the arguments that are its state."""

    alike: dict[str, str] = field(default_factory=dict)
    """Tensor of a folded block -> its like in the first block of the kind: in the same state."""

    blocks: list[Block] = field(default_factory=list)
    """Where a folded graph was unfolded: the copies, in the order of their ops."""

    counts: dict[str, int] = field(default_factory=dict)
    """Op or tensor of a folded block -> how many of it the unfolded model has."""

    def times(self, name: str) -> int:
        """How many copies of the op or tensor `name` the unfolded model has."""
        return self.counts.get(name, 1)

    def priced(self, item: Op | Boundary) -> bool:
        """Whether an op or a change of placement costs what it takes."""
        return item.traced_call not in self.unpriced

    def one(self, name: str) -> str:
        """The tensor whose state `name` has."""
        return self.alike.get(name, name)

    def outer(self) -> dict[str, Boundary]:
        """Boundaries into a module whose tensor just came into one around it, by target.

        Such a boundary can still take the tensor as it was before the outer one changed it: but
        not where what it does depends on the tensor.
        """
        entered = {b.target: b for b in self.boundaries if b.side == "in"}
        inner = [b for b in entered.values() if b.source in entered]
        at = {b[:3] for b in inner}  # module, side, slot
        several = Counter(
            slot[:3] for slot in {self.slot(b) for b in self.boundaries if b[:3] in at}
        )
        return {b.target: entered[b.source] for b in inner if several[b[:3]] == 1}

    def slot(self, boundary: Boundary) -> Slot:
        """The slot of a boundary: tensors there with one number of dims have one redistribution."""
        ndim = len(self.tensors[boundary.source].shape)
        return Slot(boundary.module, boundary.side, boundary.slot, ndim)

    def readings(self) -> Counter[str]:
        """How often priced ops of the unfolded model read each tensor."""
        ops = [op for op in self.ops if self.priced(op)]
        if not self.counts:
            return Counter(n for op in ops for n in {*op.inputs})
        out: Counter[str] = Counter()
        for op in ops:
            for name in {*op.inputs}:
                out[name] += max((self.times(n) for n in op.outputs), default=1)
        return out

    def first_run(self) -> Graph:
        """The graph of the first run alone, with everything that is stored; this one if it is."""
        return self._only(lambda item: not item.traced_call)

    def priced_runs(self) -> Graph:
        """The graph of the runs that cost something, with everything that is stored."""
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

    def producers(self) -> dict[str, Op]:
        """Tensor name -> the op that makes it."""
        return {out: op for op in self.ops for out in op.outputs}
