"""Which attribute does a size come from? Integers that remember, and what is noted of them.

Model code mixes sizes read off tensors (right on a local tensor by themselves), sizes from
attributes (`self.num_heads`, `config.hidden_size // n`), which must be replaced by local ones, and
literals, which nothing can replace. While tracing, every int attribute of every module and of its
config (`sourced_attributes.py`), and every size read off a tensor, is a `SourcedInt`: an int whose
arithmetic keeps the expression. A torch function mode (`size_mode.py`) sees where one becomes a
size of a result. An attribute that takes part in float arithmetic (`x / self.num_heads`) is pinned:
it must keep its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.sizes.callers import caller
from shardwright.planner.trace.sizes.expressions import (
    Expression,
    SizeFact,
    attributes_of,
    is_mixed,
    is_product,
    reads_of,
)
from shardwright.runtime.code.model_objects import is_config
from shardwright.runtime.slots import PLAIN, parts

ASKING = """
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __mod__ __rmod__ __divmod__ __rdivmod__ __int__ __round__
__floor__ __ceil__ __trunc__ __abs__ __hash__ __and__ __rand__
__or__ __ror__ __xor__ __rxor__ __lshift__ __rlshift__ __rshift__ __rrshift__ __invert__
""".split()
"""Methods of integers whose results remember nothing."""

PINNING = "__pow__ __rpow__ __truediv__ __rtruediv__ __float__ __repr__ __str__ __format__".split()
"""Those that compute with the value, or write it: as a key of a cache, it may be."""


@dataclass
class Provenance:
    """What one trace shows of where sizes come from; its integers know it, so that they can tell.

    A read is (number of the tensor, dim); the number is that in "read" expressions.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    """Of modules, by id."""

    pinned: set[tuple[str, str]] = field(default_factory=set)
    """Attributes (module, name) used as numbers."""

    sizes: list[tuple[torch.Tensor, SizeFact]] = field(default_factory=list)
    """Tensors with sizes that were computed, or bare numbers."""

    sources: dict[int, torch.Tensor] = field(default_factory=dict)
    """The tensors, by number, that some size, or some number, was computed from; once `close`d."""

    fixed: set[tuple[int, int]] = field(default_factory=set)
    """Reads used as numbers: the results would change with the size."""

    counted: set[tuple[int, int]] = field(default_factory=set)
    """Reads that made new tensors."""

    equal: dict[tuple[Expression, Expression], None] = field(default_factory=dict)
    """Pairs of expressions that code compared and found equal: so they must be on each rank."""

    compared: dict[int, torch.Tensor] = field(default_factory=dict)
    """The tensors, by number, that only `equal` speaks of; once `close`d."""

    ended: bool = False
    """Whether the trace is over. What is left of its integers then are constants."""

    _read: list[torch.Tensor] = field(default_factory=list)
    """The tensors whose sizes were read, by number."""

    def read(self, x: torch.Tensor, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """The sizes of `x`, which remember it, but for those that only data has."""
        self._read.append(x)
        number = len(self._read) - 1
        sizes = [
            SourcedInt.make(n, ("read", n, number, dim), self) if type(n) is int else n
            for dim, n in enumerate(shape)
        ]
        return torch.Size(sizes) if isinstance(shape, torch.Size) else tuple(sizes)

    def sized(self, x: Any, facts: Iterable[SizeFact]) -> Any:
        """`x`, after `facts` on it are noted if it is a tensor."""
        if isinstance(x, torch.Tensor) and (facts := [*facts]):
            by = caller(self.names)
            self.sizes.extend((inner(x), fact._replace(caller=by)) for fact in facts)
        return x

    def as_number(self, expression: Expression) -> None:
        """Note that something is computed with the value of `expression`."""
        self.pinned |= attributes_of(expression)
        self.fixed |= reads_of(expression)

    def as_equal(self, one: Expression, other: Expression) -> None:
        """Note that code found two integers equal: in a comparison, or as keys of a cache.

        What it does then, and what it takes from the cache, is right on a rank where they are equal
        there, too.
        """
        if one != other and not {one[0], other[0]} <= {"constant"}:
            self.equal[one, other] = None

    def as_question(self, expression: Expression) -> None:
        """Note that code asks for the value of `expression`, of which the trial compares one.

        Where it hangs on sizes of the model and on those of a call, other calls have others.
        """
        if is_mixed(expression):
            self.as_number(expression)

    def close(self) -> None:
        """Keep, of all tensors that were read, those that something hangs on."""
        numbers = {n for _, fact in self.sizes for n, _ in reads_of(fact.expression)}
        numbers |= {n for n, _ in self.fixed | self.counted}
        self.sources = {n: inner(self._read[n]) for n in sorted(numbers)}
        asked = {n for pair in self.equal for side in pair for n, _ in reads_of(side)}
        self.compared = {n: inner(self._read[n]) for n in sorted(asked - numbers)}
        self._read.clear()


class SourcedInt(int):
    """An int that remembers what it was computed from, and whose trace it belongs to.

    A copy of one is a plain int.
    """

    history: Expression
    provenance: Provenance

    @classmethod
    def make(cls, value: int, expression: Expression, provenance: Provenance) -> SourcedInt:
        """An int of this value with this history."""
        out = cls(value)
        out.history, out.provenance = expression, provenance
        return out

    @property
    def expression(self) -> Expression:
        """What it was computed from; once its trace is over, its value: a cache may hold it yet."""
        return ("constant", self.plain) if self.provenance.ended else self.history

    @property
    def plain(self) -> int:
        """Its value, of which nothing is remembered or noted."""
        return int.__int__(self)

    def __neg__(self) -> SourcedInt:
        expression = ("-", ("constant", 0), self.expression)
        return SourcedInt.make(int.__neg__(self), expression, self.provenance)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def seen_by_users(value: Any, around: tuple[int, ...] = ()) -> None:
    """Note that users see the integers in `value`: they are to be those of the whole.

    Objects of classes of one's own are looked at by their attributes, but for configs.
    """
    if isinstance(value, SourcedInt):
        value.provenance.as_number(value.expression)
    elif not (isinstance(value, (torch.Tensor, *PLAIN)) or is_config(value) or id(value) in around):
        for pair in [*(parts(value) or ())]:  # numbers may be keys, too
            for part in pair:
                seen_by_users(part, (*around, id(value)))


def expression_of(value: int) -> Expression:
    """What `value` was computed from."""
    return value.expression if isinstance(value, SourcedInt) else ("constant", int(value))


def _keep(symbol: str, method: str, swapped: bool) -> Any:
    def apply(self: SourcedInt, other: Any) -> Any:
        result = getattr(int, method)(self, other)
        if type(other) not in (int, SourcedInt) or result is NotImplemented:
            if isinstance(other, float):
                self.provenance.as_question(self.expression)
            return result
        left, right = (other, self) if swapped else (self, other)
        expression = (symbol, expression_of(left), expression_of(right))
        return SourcedInt.make(result, expression, self.provenance)

    return apply


def _pin(method: str) -> Any:
    def apply(self: SourcedInt, *others: Any) -> Any:
        self.provenance.as_number(self.expression)
        return getattr(int, method)(self, *others)

    return apply


def _ask(method: str) -> Any:
    def apply(self: SourcedInt, *others: Any) -> Any:
        other = others[0] if others else None
        if not isinstance(other, SourcedInt):
            if type(other) is not int or other or not is_product(self.expression):
                self.provenance.as_question(self.expression)
        elif method not in ("__eq__", "__ne__"):
            self.provenance.as_question(("-", self.expression, other.expression))
        elif int.__eq__(self, other):
            self.provenance.as_equal(self.expression, other.expression)
        return getattr(int, method)(self, *others)

    return apply


for _symbol, _name in (("+", "add"), ("-", "sub"), ("*", "mul"), ("//", "floordiv")):
    setattr(SourcedInt, f"__{_name}__", _keep(_symbol, f"__{_name}__", False))
    setattr(SourcedInt, f"__r{_name}__", _keep(_symbol, f"__r{_name}__", True))
for _name in PINNING:
    setattr(SourcedInt, _name, _pin(_name))
for _name in ASKING:
    setattr(SourcedInt, _name, _ask(_name))
