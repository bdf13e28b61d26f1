"""Marks: facts about tensors of a graph. Each kind of mark is one field of `Marks`.

Code that rewrites a graph (renames tensors, drops runs, folds and unfolds blocks) handles all kinds
in the same way and names none of them. A new kind needs a field here and a line in `trace/` that
sets it. If no `Demand` expresses its meaning, it also needs a line where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

Names = tuple[str, ...]


class Demand(Enum):
    """What a mark demands of its tensors. Problem and checker decide which states fulfil it."""

    NOTHING = "nothing"
    REPLICATED = "every rank has the tensor, and its whole gradient"
    READABLE = "every rank has the tensor: no shards, and not Partial"
    SUMMED = "not Partial"
    ONE_STATE = "the tensors of an entry are in one state"


@dataclass(frozen=True)
class Kind:
    """How entries of one kind name tensors, and what the kind demands of plans.

    Attributes:
        names: Returns the tensors that an entry names.
        naming: Returns the same entry for other tensors.
        demand: The demand on the states of the tensors.
        reason: The demand as text for error messages; {0} is the first tensor.
        stays: Whether the mark belongs to a place and is dropped with the tensor there. Marks of
            other kinds move to the tensor that replaces it.
    """

    names: Callable[[Any], Names]
    naming: Callable[[Any, Names], Any]
    demand: Demand = Demand.NOTHING
    reason: str = ""
    stays: bool = False


class Draw(NamedTuple):
    """A place where code draws random numbers for the elements of a tensor.

    Attributes:
        module: The module whose code draws.
        call: The number of the call of that module.
        number: The number of the draw in that call; -1 if code draws in a way that is not traced.
        weights: Whether the numbers are for attention weights; the tensor is then the queries.
        features: Whether there is one number for each row and channel, the first two dims.
        trains: Whether the call was traced in training mode.
        always: Whether the number is drawn in eval mode, too, as a call in eval mode shows.
    """

    module: str = ""
    call: int = 0
    number: int = -1
    weights: bool = False
    features: bool = False
    trains: bool = False
    always: bool = False


def _tensors(demand: Demand = Demand.NOTHING, reason: str = "", stays: bool = False) -> Any:
    """Declare a kind whose entries are tensors."""
    kind = Kind(lambda entry: (entry,), lambda _, names: names[0], demand, reason, stays)
    return field(default_factory=set, metadata={"kind": kind})


def _dims() -> Any:
    """Declare a kind whose entries are (tensor, number of the dim or another value)."""
    kind = Kind(lambda entry: entry[:1], lambda entry, names: (*names, entry[1]))
    return field(default_factory=set, metadata={"kind": kind})


def _beside() -> Any:
    """Declare a kind whose entries are (tensor, other tensor, dim of that)."""
    kind = Kind(lambda entry: entry[:2], lambda entry, names: (*names, entry[-1]))
    return field(default_factory=set, metadata={"kind": kind})


def _several(demand: Demand, reason: str) -> Any:
    """Declare a kind whose entries are tuples of tensors."""
    kind = Kind(lambda entry: entry, lambda _, names: names, demand, reason)
    return field(default_factory=set, metadata={"kind": kind})


@dataclass
class Marks:
    """All marks of a graph: one field per kind, with its entries."""

    joined: set[str] = _tensors(
        Demand.REPLICATED, "untraced code of the model may read the full tensor"
    )
    """Tensors that untraced code may join with the output of a part of the model."""

    read_values: set[str] = _tensors(
        Demand.READABLE, "every rank reads the same numbers off a tensor"
    )
    """Tensors that code reads numbers from."""

    decided_unseen: set[str] = _tensors(
        Demand.REPLICATED, "code may branch on its inputs where the trace cannot see it"
    )
    """Tensors of code that decides by values or lengths of inputs where no comparison is seen."""

    own_gradients: set[str] = _tensors(
        Demand.REPLICATED, "code computes with the full gradient of a tensor"
    )
    """Tensors whose gradient code changes, by a hook or by a custom autograd function."""

    linear_gradients: set[str] = _tensors(
        Demand.READABLE, "a custom autograd function takes and returns full tensors"
    )
    """Tensors whose gradient goes through a linear custom backward: a partial one is enough."""

    written: set[tuple[str, str, str]] = _several(
        Demand.ONE_STATE, "what is written into a parameter has its placement: {0}"
    )
    """(stored parameter, tensor that its module sees, tensor that is written into it).

    The last two are the same for a tensor that is only written in training, for example batch
    statistics.
    """

    assigned: set[str] = _tensors()
    """Stored parameters whose `data`, flags, gradient or hooks code has to do with."""

    in_place: set[tuple[str, str]] = _several(
        Demand.ONE_STATE, "a tensor that a module changes in place keeps its placement: {0}"
    )
    """(tensor outside of a module, tensor inside it): the module changes the tensor in place, and
    code after the module reads it."""

    changed_in_regions: set[tuple[str, str]] = _several(
        Demand.ONE_STATE, "code that may be skipped must not change a placement"
    )
    """Tensors before and after conditional code (which data may skip) changes them."""

    resumed: set[tuple[str, str]] = _several(
        Demand.ONE_STATE, "a call must keep the placement of a cache or attribute: {0}"
    )
    """Tensors in a cache or in attributes, before and after a call that continues from them."""

    handed_on: set[tuple[str, str]] = _several(
        Demand.ONE_STATE, "each run of a loop must find the same placement: {0}"
    )
    """Tensors before and after the only run of a loop, which more runs would hand on."""

    modes: set[tuple[str, str]] = _several(
        Demand.ONE_STATE,
        "a module needs the same placements in training and eval mode: it may be in either",
    )
    """(tensor at a module in eval mode, tensor in the same call in training mode)."""

    collected: set[str] = _tensors(Demand.REPLICATED, "what is made of all blocks is replicated")
    """Tensors that code reads from every block of a stack, and tensors computed from them."""

    logits: set[str] = _tensors(Demand.SUMMED, "the scores of a loss are not Partial")
    """Tensors that become the scores of a loss. The loss then needs no all-gather."""

    reused_outputs: set[str] = _tensors(
        Demand.REPLICATED, "a tensor that the model returns and also uses must be replicated"
    )
    """Tensors that the model both returns and reads in a module. The gradient of each sums the
    gradients from all of its uses."""

    carried: set[str] = _tensors()
    """Tensors that one block of a stack passes to the next; users see them as hidden states."""

    overwritten: set[str] = _tensors()
    """Tensors that code changes in place. Autograd forbids it if a reshard returned a view."""

    drawn: set[tuple[str, Draw]] = _dims()
    """(tensor, `Draw`): the tensors for whose elements random numbers are drawn."""

    in_regions: set[str] = _tensors(stays=True)
    """Parameters read in conditional code that ranks may run alone, and boundary targets in it.

    No rank communicates there.
    """

    loop_masks: set[str] = _tensors()
    """Masks of loops that make one pass per true element."""

    spread_experts: set[tuple[str, tuple[int, int, int]]] = _dims()
    """(parameter with rows for the first experts, or a view of one; how many these are, all, and
    how often each token is computed): each rank of `ep` holds some of them."""

    travelling: set[tuple[str, tuple[int, int]]] = _dims()
    """(tokens, experts of each and in all): they travel to the ranks of `ep` that hold these.

    Of each 0, if the tokens lie by expert. What comes back of these has an entry of its own, with 0
    in all.
    """

    data_sized: set[tuple[str, int]] = _dims()
    """Dims whose length depends on data."""

    sized: set[tuple[str, int]] = _dims()
    """Dims of inputs whose length is a size of the model, the same in each call."""

    beside_lost: set[tuple[str, str, int]] = _beside()
    """(tensor, other tensor, dim): code that has the tensor gets the other's length as a plain
    number, and may do something else for another length."""

    beside_tests: set[tuple[str, str]] = _dims()
    """(tensor, module): code of the module compares lengths, and has the tensor."""

    cut_by: set[tuple[str, str, int]] = _beside()
    """(result of an op, other tensor, dim): the op takes or adds parts by the other's length."""

    fixed: set[tuple[str, int]] = _dims()
    """Dims whose length the code states as a bare number or computes with; never sharded."""

    counted: set[tuple[str, int]] = _dims()
    """Dims whose length sizes new tensors (positions, masks). If such a dim were sharded, these
    tensors would get the length of the shard."""

    inferred: set[tuple[str, int]] = _dims()
    """Dims whose length is a size of a view beside one that torch infers (-1): it cannot if a rank
    has nothing of such a dim."""

    def entries(self) -> Iterator[tuple[str, set[Any]]]:
        """Yield the name and the entries of every kind."""
        return ((name, getattr(self, name)) for name in KINDS)

    def names(self) -> set[str]:
        """Return every tensor that has a mark."""
        return {n for kind, found in self.entries() for e in found for n in KINDS[kind].names(e)}

    def demands(self) -> Iterator[tuple[str, Demand, Names]]:
        """Yield kind, demand and tensors of each entry with a demand, in a fixed order."""
        for name, found in self.entries():
            kind = KINDS[name]
            if kind.demand is not Demand.NOTHING:
                yield from ((name, kind.demand, n) for n in sorted(map(kind.names, found)))

    def copied(self, copies: Callable[[Names], Iterable[Names]]) -> Marks:
        """Return the marks with each entry copied to the tensors that `copies` returns, if any."""
        return self._each(lambda _, names: copies(names))

    def renamed(self, others: Mapping[str, str]) -> Marks:
        """Return the marks after the tensors in `others` were replaced by their values."""

        def follow(kind: Kind, names: Names) -> list[Names]:
            if kind.stays and any(n in others for n in names):
                return []
            return [tuple(others.get(n, n) for n in names)]

        return self._each(follow)

    def spread(self, like: Callable[[str], Iterable[str]]) -> Marks:
        """Copy each mark of one tensor to the tensors like it.

        Tensors that are alike have one state, so marks of several tensors are not copied.
        """
        return self.copied(lambda e: [(n,) for n in like(e[0])] if len(e) == 1 else [e])

    def kept(self, names: Container[str]) -> Marks:
        """Return the marks of these tensors only."""
        return self.copied(lambda each: [each] if all(n in names for n in each) else [])

    def _each(self, others: Callable[[Kind, Names], Iterable[Names]]) -> Marks:
        out = Marks()
        for name, found in self.entries():
            kind = KINDS[name]
            made = {kind.naming(e, n) for e in found for n in others(kind, kind.names(e))}
            setattr(out, name, made)
        return out


KINDS: Mapping[str, Kind] = {f.name: f.metadata["kind"] for f in fields(Marks)}
