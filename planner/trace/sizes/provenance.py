"""Track which attributes and tensor sizes each size in a trace was computed from.

Model code mixes three kinds of sizes: sizes read off tensors, which are correct on a local tensor;
sizes from attributes (`self.num_heads`, `config.hidden_size // n`), which must be replaced by local
sizes; and literals, which cannot be replaced. In a trace, every int attribute of every module and
of its config (`sourced_attributes.py`), and every size read off a tensor, is a `SourcedInt`: an int
whose arithmetic keeps the expression. A torch function mode (`size_mode.py`) sees where a
`SourcedInt` becomes a size of a result. An attribute in float arithmetic (`x / self.num_heads`) is
pinned: it must keep its value.
"""

from __future__ import annotations

import linecache
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.data_queries.model_code import is_plumbing, module_of
from shardwright.planner.trace.sizes.callers import caller, in_model_code
from shardwright.planner.trace.sizes.expressions import (
    Expression,
    SizeFact,
    attributes_of,
    is_mixed,
    is_product,
    reads_of,
)
from shardwright.planner.trace.sizes.length_tests import SIGNS, LengthTest, LengthTests
from shardwright.runtime.code.model_objects import is_config
from shardwright.runtime.slots import HOLD_NO_TENSORS, parts

ASKING = """
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __divmod__ __rdivmod__ __int__ __round__
__floor__ __ceil__ __trunc__ __abs__ __hash__ __and__ __rand__
__or__ __ror__ __xor__ __rxor__ __lshift__ __rlshift__ __rshift__ __rrshift__ __invert__
""".split()
"""Methods of integers whose results have no history."""

PINNING = """
__pow__ __rpow__ __float__ __repr__ __str__ __format__
bit_length bit_count as_integer_ratio to_bytes
""".split()
"""Methods that compute with the value, or write it as text (perhaps as a cache key)."""


LOSING = """
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __bool__ __int__ __trunc__ __round__ __float__
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__
__rfloordiv__ __mod__ __rmod__ __divmod__ __rdivmod__ __pow__ __rpow__ __neg__ __abs__
__repr__ __str__ __format__ is_integer as_integer_ratio
""".split()
"""Methods of quotients whose results have no history."""


@dataclass
class Provenance:
    """The provenance of sizes in one trace. Each `SourcedInt` of the trace refers to it.

    A read is (number of the tensor, dim), with the number that "read" expressions have.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    """Id of a module -> name of the module."""

    pinned: set[tuple[str, str]] = field(default_factory=set)
    """Attributes (module, name) used as numbers."""

    sizes: list[tuple[torch.Tensor, SizeFact]] = field(default_factory=list)
    """Tensors with sizes that were computed, or that are bare numbers."""

    sources: dict[int, torch.Tensor] = field(default_factory=dict)
    """Number -> tensor, for the reads that sizes or numbers were computed from. Set by `close`."""

    fixed: set[tuple[int, int]] = field(default_factory=set)
    """Reads used as numbers: results would change with the size."""

    counted: set[tuple[int, int]] = field(default_factory=set)
    """Reads that are sizes of newly created tensors."""

    inferred: set[tuple[int, int]] = field(default_factory=set)
    """Reads that are sizes of a view beside one that torch infers (-1)."""

    cutting: set[tuple[int, int]] = field(default_factory=set)
    """Reads that functions get which may take parts of tensors by them."""

    equal: dict[tuple[Expression, Expression], None] = field(default_factory=dict)
    """Pairs of expressions that code found equal: they must be equal on each rank."""

    compared: dict[int, torch.Tensor] = field(default_factory=dict)
    """Number -> tensor, for reads that occur only in `equal` and `cutting`. Set by `close`."""

    tests: LengthTests = field(default_factory=LengthTests)
    """Comparisons of lengths."""

    deciding: list[LengthTest] = field(default_factory=list)
    """Those that code decides by, always in the same way. Set by `close`."""

    dims: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    """Tensors of whose number of dims code asks, with the place in the code."""

    running: Sequence[str] = ()
    """The modules that currently run, the innermost last."""

    handed_on: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What loops that lengths count begin with, and what their only run makes of it."""

    lost: dict[tuple[str, Expression], None] = field(default_factory=dict)
    """(module, expression) of numbers that its code gets without their history: what it decides by
    them is not seen."""

    ended: bool = False
    """Whether the trace is over. Its remaining integers then count as constants."""

    _read: list[torch.Tensor] = field(default_factory=list)
    """Tensors whose sizes were read; the index is the number."""

    def read(self, x: torch.Tensor, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the sizes of `x` as `SourcedInt`s, except sizes that depend on data."""
        self._read.append(x)
        number = len(self._read) - 1
        sizes = [
            SourcedInt.make(n, ("read", n, number, dim), self) if type(n) is int else n
            for dim, n in enumerate(shape)
        ]
        return torch.Size(sizes) if isinstance(shape, torch.Size) else tuple(sizes)

    def sized(self, x: Any, facts: Iterable[SizeFact]) -> Any:
        """Note `facts` about `x` if it is a tensor, and return `x`."""
        if isinstance(x, torch.Tensor) and (facts := [*facts]):
            by = caller(self.names)
            self.sizes.extend((inner(x), fact._replace(caller=by)) for fact in facts)
        return x

    def as_number(self, expression: Expression) -> None:
        """Note that code computes with the value of `expression`: it must not change."""
        self.pinned |= attributes_of(expression)
        self.fixed |= reads_of(expression)

    def as_dims(self, x: torch.Tensor, by: str = "") -> None:
        """Note that code asks for the number of dims of `x`, if its line has `by`.

        Tensors of floats have theirs in placements.
        """
        frame = sys._getframe(2)
        if not (x.is_floating_point() or is_plumbing(module_of(frame))):
            file, line = frame.f_code.co_filename, frame.f_lineno
            if by in linecache.getline(file, line):
                self.dims.append((inner(x), f"{Path(file).name}:{line}"))

    def as_equal(self, one: Expression, other: Expression) -> None:
        """Note that code found two integers equal, in a comparison or as keys of a cache.

        The code after that, or the cached value, is correct on a rank if they are equal there too.
        """
        if one != other and not {one[0], other[0]} <= {"constant"}:
            self.equal[one, other] = None

    def as_question(self, expression: Expression) -> None:
        """Note that code branches on the value of `expression`.

        The trial compares the branch for the traced sizes only. If the expression mixes sizes of
        the model and of a call, other calls may branch differently: it then counts as a number.
        """
        if is_mixed(expression):
            self.as_number(expression)

    @property
    def innermost(self) -> str:
        """Return the module that currently runs."""
        return self.running[-1] if self.running else ""

    def as_lost(self, expression: Expression) -> None:
        """Note that code of a model gets the value of `expression` as a plain number."""
        if reads_of(expression) and in_model_code():
            self.lost[self.innermost, expression] = None

    def close(self) -> None:
        """Keep only the tensors whose reads are used; sets `sources` and `compared`."""
        numbers = {n for _, fact in self.sizes for n, _ in reads_of(fact.expression)}
        numbers |= {n for n, _ in self.fixed | self.counted}
        self.sources = {n: inner(self._read[n]) for n in sorted(numbers)}
        self.deciding = self.tests.deciding()
        sides = [*self.equal, *((test.left, test.right) for test in self.deciding)]
        sides += [(expression,) for _, expression in self.lost]
        asked = {n for pair in sides for side in pair for n, _ in reads_of(side)}
        asked |= {n for n, _ in self.cutting}
        self.compared = {n: inner(self._read[n]) for n in sorted(asked - numbers)}
        self._read.clear()


class SourcedInt(int):
    """An int with the expression that it was computed from, and the provenance of its trace.

    Copying or pickling it gives a plain int.
    """

    history: Expression
    provenance: Provenance

    @classmethod
    def make(cls, value: int, expression: Expression, provenance: Provenance) -> SourcedInt:
        """Return an int with this value and history."""
        out = cls(value)
        out.history, out.provenance = expression, provenance
        return out

    @property
    def expression(self) -> Expression:
        """The expression that it was computed from; a constant once the trace is over.

        A cache may still hold the integer after its trace.
        """
        return ("constant", self.plain) if self.provenance.ended else self.history

    @property
    def plain(self) -> int:
        """Its value as a plain int; this notes nothing."""
        return int.__int__(self)

    def __pos__(self) -> SourcedInt:
        return self

    real = numerator = property(__pos__)  # type: ignore[assignment]

    def __neg__(self) -> SourcedInt:
        expression = ("-", ("constant", 0), self.expression)
        return SourcedInt.make(int.__neg__(self), expression, self.provenance)

    def __bool__(self) -> bool:
        return self != 0

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class SourcedFloat(float):
    """The quotient of a `SourcedInt` and another integer. Rounded, it is a `SourcedInt` again."""

    sides: tuple[Expression, Expression]
    provenance: Provenance

    @classmethod
    def make(cls, left: int, right: int, provenance: Provenance) -> SourcedFloat:
        """Return the quotient."""
        out = cls(int.__truediv__(left, right))
        out.sides, out.provenance = (expression_of(left), expression_of(right)), provenance
        return out

    def __ceil__(self) -> SourcedInt:
        left, right = self.sides
        down = ("//", ("-", ("constant", 0), left), right)
        expression = ("-", ("constant", 0), down)
        return SourcedInt.make(math.ceil(self.plain), expression, self.provenance)

    def __floor__(self) -> SourcedInt:
        return SourcedInt.make(math.floor(self.plain), ("//", *self.sides), self.provenance)

    @property
    def plain(self) -> float:
        """Its value as a plain float; this notes nothing."""
        return float.__add__(self, 0.0)

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (self.plain,)


def seen_by_users(value: Any, around: tuple[int, ...] = ()) -> None:
    """Note that users see the integers in `value`: they must be those of the unsharded model.

    Attributes of objects of other classes are searched too, except those of configs.
    """
    if isinstance(value, SourcedInt):
        value.provenance.as_number(value.expression)
    elif not (
        isinstance(value, (torch.Tensor, *HOLD_NO_TENSORS))
        or is_config(value)
        or id(value) in around
    ):
        for pair in [*(parts(value) or ())]:  # keys may be numbers too
            for part in pair:
                seen_by_users(part, (*around, id(value)))


def expression_of(value: int) -> Expression:
    """Return the expression that `value` was computed from."""
    return value.expression if isinstance(value, SourcedInt) else ("constant", int(value))


def _keep(symbol: str, method: str, swapped: bool) -> Any:
    def apply(self: SourcedInt, other: Any) -> Any:
        result = getattr(int, method)(self, other)
        if type(other) not in (int, SourcedInt) or result is NotImplemented:
            if isinstance(other, float):
                self.provenance.as_question(self.expression)
                self.provenance.as_lost(self.expression)
            elif symbol == "*" and isinstance(other, (list, tuple)):  # code may go through it
                tests, module = self.provenance.tests, self.provenance.innermost
                none, one, frame = ("constant", 0), ("constant", 1), sys._getframe(1)
                tests.note_runs(frame, self.expression, one, max(self.plain, 0), module)
                tests.note("<=", self.expression, none, self.plain <= 0, module)
            return result
        left, right = (other, self) if swapped else (self, other)
        expression = (symbol, expression_of(left), expression_of(right))
        return SourcedInt.make(result, expression, self.provenance)

    return apply


def _pin(method: str) -> Any:
    def apply(self: SourcedInt, *others: Any) -> Any:
        self.provenance.as_number(self.expression)
        self.provenance.as_lost(self.expression)
        return getattr(int, method)(self, *others)

    return apply


def _bound(method: str, other: Any) -> int | None:
    """Return the integer that a comparison with `other` compares with; None if no number is it."""
    if not isinstance(other, float):
        return other if isinstance(other, int) else None
    if not math.isfinite(other) or (method in ("__eq__", "__ne__") and other % 1):
        return None  # it comes out the same for all lengths
    return math.ceil(other) if method in ("__lt__", "__ge__") else math.floor(other)


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
        result = getattr(int, method)(self, *others)
        if result is NotImplemented and isinstance(other, float):
            result = getattr(operator, method)(self.plain, other)
        if method not in SIGNS:
            self.provenance.as_lost(self.expression)
        bound = _bound(method, other) if method in SIGNS else None
        if bound is not None and isinstance(result, bool):
            sides = self.expression, expression_of(bound)
            module = self.provenance.innermost
            self.provenance.tests.note(SIGNS[method], *sides, result, module)
        return result

    return apply


def _divide(swapped: bool) -> Any:
    def apply(self: SourcedInt, other: Any) -> Any:
        self.provenance.as_number(self.expression)
        if type(other) not in (int, SourcedInt) or not (self if swapped else other):
            self.provenance.as_lost(self.expression)
            divide = int.__rtruediv__ if swapped else int.__truediv__
            return divide(self, other)
        if isinstance(other, SourcedInt):
            self.provenance.as_number(other.expression)
        left, right = (other, self) if swapped else (self, other)
        return SourcedFloat.make(left, right, self.provenance)

    return apply


def _lose(method: str) -> Any:
    def apply(self: SourcedFloat, *others: Any) -> Any:
        for side in self.sides:
            self.provenance.as_lost(side)
        return getattr(float, method)(self, *others)

    return apply


def _unseen(where: Any, name: str) -> Any:
    own = getattr(where, name)

    def apply(*given: Any) -> Any:
        bounds = (x for at in given if isinstance(at, slice) for x in (at.start, at.stop, at.step))
        for value in (*given, *bounds):
            if isinstance(value, SourcedInt):
                value.provenance.as_lost(value.expression)
        return own(*given)

    return where, name, apply


UNSEEN = [_unseen(math, name) for name in ("log", "log2", "log10", "gcd", "lcm")]
UNSEEN += [_unseen(kind, "__getitem__") for kind in (nn.ModuleList, nn.Sequential)]
"""Functions that codes compute lengths with (the next power of 2) or choose modules by, and what
notes it."""

for _name in LOSING:
    setattr(SourcedFloat, _name, _lose(_name))
for _symbol, _name in (("+", "add"), ("-", "sub"), ("*", "mul"), ("//", "floordiv"), ("%", "mod")):
    setattr(SourcedInt, f"__{_name}__", _keep(_symbol, f"__{_name}__", False))
    setattr(SourcedInt, f"__r{_name}__", _keep(_symbol, f"__r{_name}__", True))
for _name in PINNING:
    setattr(SourcedInt, _name, _pin(_name))
SourcedInt.__truediv__, SourcedInt.__rtruediv__ = _divide(False), _divide(True)  # type: ignore
for _name in ASKING:
    setattr(SourcedInt, _name, _ask(_name))
