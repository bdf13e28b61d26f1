"""Marks: what is known of tensors beside what they are, each kind of mark one entry of `Marks`.

Whatever goes over a graph (renames, leaves runs out, folds and unfolds blocks) treats all kinds
alike and names none. So a new kind is an entry here, a line where it is found (`trace/`) and, if
none of the `Demand`s says it, one where it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

Names = tuple[str, ...]


class Demand(Enum):
    """What a mark wants of its tensors; the problem and the checker each say which states do."""

    NOTHING = "nothing"
    REPLICATED = "every rank has the tensor, and its whole gradient"
    READABLE = "every rank has the tensor: no shards, and not Partial"
    SUMMED = "not Partial"
    ONE_STATE = "the tensors of an entry are in one state"


@dataclass(frozen=True)
class Kind:
    """How entries of one kind name tensors, and what that means for plans.

    Attributes:
        names: The tensors that an entry names.
        naming: The same entry of other tensors.
        demand: What it wants of their states.
        reason: That in words, of the first of them, for what cannot be.
        stays: It is known of a place, and goes with the tensor there; other kinds go over to the
            tensor that is taken instead.
    """

    names: Callable[[Any], Names]
    naming: Callable[[Any, Names], Any]
    demand: Demand = Demand.NOTHING
    reason: str = ""
    stays: bool = False


class Draw(NamedTuple):
    """Where code draws random numbers for the elements of a tensor.

    Attributes:
        module: Whose code does.
        call: Which call of that module it is in.
        number: Which draw of that call; -1 where numbers are drawn in another way than by dropout.
        weights: Whether they are for what attention makes of the tensor, its queries.
    """

    module: str = ""
    call: int = 0
    number: int = -1
    weights: bool = False


def _tensors(demand: Demand = Demand.NOTHING, reason: str = "", stays: bool = False) -> Any:
    """A kind whose entries are tensors."""
    kind = Kind(lambda entry: (entry,), lambda _, names: names[0], demand, reason, stays)
    return field(default_factory=set, metadata={"kind": kind})


def _dims() -> Any:
    """A kind whose entries are (tensor, number of the dim), or what else is said of a tensor."""
    kind = Kind(lambda entry: entry[:1], lambda entry, names: (*names, entry[1]))
    return field(default_factory=set, metadata={"kind": kind})


def _several(demand: Demand, reason: str) -> Any:
    """A kind whose entries are several tensors."""
    kind = Kind(lambda entry: entry, lambda _, names: names, demand, reason)
    return field(default_factory=set, metadata={"kind": kind})


@dataclass
class Marks:
    """Every kind of mark, and its entries."""

    joined: set[str] = _tensors(Demand.REPLICATED, "what the model gives out is replicated")
    """Tensors that code which is not traced may join with what a part of the model gives."""

    read_values: set[str] = _tensors(
        Demand.READABLE, "every rank reads the same numbers off a tensor"
    )
    """Tensors that code reads numbers off."""

    own_gradients: set[str] = _tensors(
        Demand.REPLICATED, "code computes with the full gradient of a tensor"
    )
    """Tensors whose gradient code changes, by a hook or by a function with its own backward."""

    linear_gradients: set[str] = _tensors(
        Demand.READABLE, "a function with a backward of its own takes and gives whole tensors"
    )
    """Those where it is linear in the gradient, so that a term of that will do."""

    written: set[tuple[str, str, str]] = _several(
        Demand.ONE_STATE, "what is written into a parameter has its placement: {0}"
    )
    """(Parameter as stored, as its module sees it, tensor that is written into it.)

    So twice as its module sees it: what is written there only when the model trains, statistics of
    batches say.
    """

    in_place: set[tuple[str, str]] = _several(
        Demand.ONE_STATE, "what a module changes in place is the tensor that it was given: {0}"
    )
    """Tensors around a module and within it, where code reads behind it what that has changed."""

    changed_in_regions: set[tuple[str, str]] = _several(
        Demand.ONE_STATE, "code that may not run changes no placement"
    )
    """Tensors before and after code changes them that may not run, as data says."""

    resumed: set[tuple[str, str]] = _several(
        Demand.ONE_STATE, "what a call leaves for the next has the placement of what it found: {0}"
    )
    """Tensors in a cache, or in attributes, before and after a call that goes on with them."""

    modes: set[tuple[str, str]] = _several(
        Demand.ONE_STATE,
        "modules take and give the same in training mode: any of them may be in it",
    )
    """Tensors that a module takes or gives in eval mode, and in the same call in training mode."""

    collected: set[str] = _tensors(Demand.REPLICATED, "what is made of all blocks is replicated")
    """Tensors that code reads from every block of a stack, and what it makes of them."""

    logits: set[str] = _tensors(Demand.SUMMED, "the scores of a loss are not Partial")
    """Tensors that become the scores of a loss, which then gathers nothing."""

    reused_outputs: set[str] = _tensors(
        Demand.REPLICATED, "what the model gives out, and goes on with itself, is one tensor"
    )
    """Tensors that the model returns and that modules read, too: the gradient of such a tensor is
    that of everything that is made of it."""

    carried: set[str] = _tensors()
    """Tensors that one block of a stack hands to the next: users see them as hidden states."""

    overwritten: set[str] = _tensors()
    """Tensors that code changes in place: autograd lets nobody do that to what only looks new."""

    drawn: set[tuple[str, Draw]] = _dims()
    """Tensors for whose elements random numbers are drawn, and where."""

    in_regions: set[str] = _tensors(stays=True)
    """Parameters that such code reads, and tensors behind boundaries in it: no rank sends there."""

    loop_masks: set[str] = _tensors()
    """Masks for whose true elements a loop makes a pass each."""

    data_sized: set[tuple[str, int]] = _dims()
    """Dims that are as long as data says."""

    sized: set[tuple[str, int]] = _dims()
    """Dims of inputs that are as long as the model is made, in each call."""

    fixed: set[tuple[str, int]] = _dims()
    """Dims that the code gives a bare number, or computes with: never split."""

    counted: set[tuple[str, int]] = _dims()
    """Dims whose length makes new tensors (positions, masks): those would be of a part's length."""

    def entries(self) -> Iterator[tuple[str, set[Any]]]:
        """Every kind by its name, with its entries."""
        return ((name, getattr(self, name)) for name in KINDS)

    def names(self) -> set[str]:
        """Every tensor that has a mark."""
        return {n for kind, found in self.entries() for e in found for n in KINDS[kind].names(e)}

    def demands(self) -> Iterator[tuple[str, Demand, Names]]:
        """Kind, demand and tensors of each entry that wants something, in a fixed order."""
        for name, found in self.entries():
            kind = KINDS[name]
            if kind.demand is not Demand.NOTHING:
                yield from ((name, kind.demand, n) for n in sorted(map(kind.names, found)))

    def copied(self, copies: Callable[[Names], Iterable[Names]]) -> Marks:
        """For each entry those of other tensors: one or many, or none; `copies` says which."""
        return self._each(lambda _, names: copies(names))

    def renamed(self, others: Mapping[str, str]) -> Marks:
        """The marks once some tensors are gone, and `others` are taken instead."""

        def follow(kind: Kind, names: Names) -> list[Names]:
            if kind.stays and any(n in others for n in names):
                return []
            return [tuple(others.get(n, n) for n in names)]

        return self._each(follow)

    def spread(self, like: Callable[[str], Iterable[str]]) -> Marks:
        """What holds for one tensor holds for those like it.

        These are in one state, so what several tensors are to each other need not be said again.
        """
        return self.copied(lambda e: [(n,) for n in like(e[0])] if len(e) == 1 else [e])

    def kept(self, names: Container[str]) -> Marks:
        """The marks of these tensors alone."""
        return self.copied(lambda each: [each] if all(n in names for n in each) else [])

    def _each(self, others: Callable[[Kind, Names], Iterable[Names]]) -> Marks:
        out = Marks()
        for name, found in self.entries():
            kind = KINDS[name]
            made = {kind.naming(e, n) for e in found for n in others(kind, kind.names(e))}
            setattr(out, name, made)
        return out


KINDS: Mapping[str, Kind] = {f.name: f.metadata["kind"] for f in fields(Marks)}
