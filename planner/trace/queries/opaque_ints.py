"""Numbers that are hidden from code: only torch may look at them, as at factors and terms.

What code computes with one is such a number again, and all else is a decision. C code reads numbers
past all methods; so it finds one far too large there, then one far too small, and does something
else with one of them at least.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.planner.trace.record.arguments import mapped
from shardwright.planner.trace.sizes.provenance import Provenance, SourcedInt

FACTORS = frozenset(
    """
mul mul_ multiply add add_ sub sub_ subtract rsub __rsub__ div div_ divide true_divide __rdiv__
__rtruediv__
""".split()
)
"""Functions of torch that do the same with other numbers. (What is split may hang on slices.)"""

DECIDING = """
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __bool__ __hash__ __int__ __float__ __index__ __complex__
__round__ __floor__ __ceil__ __trunc__ __repr__ __str__ __format__ __divmod__ __rdivmod__
__and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ __rlshift__ __rshift__ __rrshift__
__invert__
""".split()

FAR = 1 << 20
"""What C code takes a hidden integer for: no list is so long, and a loop over it ends soon."""

COMPUTING = "add sub mul truediv floordiv mod pow".split()


class Decided(Exception):
    """Code asks how large a number is."""


class Hidden:
    """What both kinds of hidden numbers have: their value, which way they lie, who is to know."""

    value: Any
    sign: int
    asked: list[Any]


class HiddenInt(Hidden, SourcedInt):
    """An integer; of those that remember their history, so that it comes first in arithmetic."""


class HiddenFloat(Hidden, float):
    """Any other number."""


def hidden(value: float, sign: int, asked: list[Any]) -> Any:
    """A number of this value that is hidden; who asks for it is noted in `asked`."""
    if isinstance(value, int):
        out: Any = HiddenInt(sign * FAR)
        out.history, out.provenance = ("constant", value), Provenance()
    else:
        out = HiddenFloat(sign * float("inf"))
    out.value, out.sign, out.asked = value, sign, asked
    return out


def _decides(self: Any, *_: Any) -> Any:
    self.asked.append(self.value)
    raise Decided("code decides by a number that it is given")


def _computes(function: Callable[[Any, Any], Any], swapped: bool) -> Any:
    def compute(self: Any, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        if not isinstance(other, (int, float)):
            return _decides(self)
        ends = self.value, other.value if isinstance(other, Hidden) else other
        return hidden(function(*(ends[::-1] if swapped else ends)), self.sign, self.asked)

    return compute


for _kind in (HiddenInt, HiddenFloat):
    for _name in DECIDING:
        setattr(_kind, _name, _decides)
    for _name in COMPUTING:
        _function = getattr(operator, _name)
        setattr(_kind, f"__{_name}__", _computes(_function, False))
        setattr(_kind, f"__r{_name}__", _computes(_function, True))
    for _name in ("neg", "pos", "abs"):
        setattr(_kind, f"__{_name}__", _decides)


class Shows(TorchFunctionMode):
    """Within, torch's functions see hidden numbers as they are, and are called `most` times."""

    def __init__(self, asked: list[Any], most: int) -> None:
        super().__init__()
        self.asked, self.left = asked, most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The same, after it is looked whether the function may have them."""
        kwargs, self.left = kwargs or {}, self.left - 1
        if self.left < 0:
            self.asked.append(None)
            raise Decided("code loops over a number that it is given")
        found = [*_hidden((args, kwargs))]
        if found and getattr(func, "__name__", "") not in FACTORS:
            _decides(found[0])
        if found:
            args, kwargs = mapped(lambda hid: hid.value, (args, kwargs), Hidden)
        return func(*args, **kwargs)


def _hidden(value: Any) -> Iterator[Any]:
    if isinstance(value, Hidden):
        yield value
    for part in _parts(value):
        yield from _hidden(part)


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (tuple, list)) else ()
