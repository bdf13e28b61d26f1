"""Opaque numbers: model code cannot read them; torch may use them only as factors and terms.

Arithmetic with an opaque number gives an opaque number. Any other use counts as a decision. C code
reads numbers without calling methods. It therefore finds a value that is far too large in one trace
and far too small in another, and behaves differently in at least one of them.
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
"""Torch functions that do the same for any number. (Shardings may depend on slice bounds.)"""

DECIDING = """
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __bool__ __hash__ __int__ __float__ __index__ __complex__
__round__ __floor__ __ceil__ __trunc__ __repr__ __str__ __format__ __divmod__ __rdivmod__
__and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ __rlshift__ __rshift__ __rrshift__
__invert__
""".split()

FAR = 1 << 20
"""The magnitude that C code sees: longer than any list, but short enough to loop over."""

COMPUTING = "add sub mul truediv floordiv mod pow".split()


class Decided(Exception):
    """Code depends on the value of an opaque number."""


class Hidden:
    """Base of opaque numbers: the value, the sign that C code sees, and the list of noted reads."""

    value: Any
    sign: int
    asked: list[Any]


class HiddenInt(Hidden, SourcedInt):
    """An opaque integer. It is a `SourcedInt` so that its methods take precedence in arithmetic."""


class HiddenFloat(Hidden, float):
    """An opaque float."""


def hidden(value: float, sign: int, asked: list[Any]) -> Any:
    """Return an opaque number with this value; reads of it are noted in `asked`."""
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
    """Mode in which torch functions get the real values; at most `most` calls are allowed."""

    def __init__(self, asked: list[Any], most: int) -> None:
        super().__init__()
        self.asked, self.left = asked, most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; an opaque number is a decision if it is not in `FACTORS`."""
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
