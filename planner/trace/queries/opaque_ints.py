"""Opaque numbers: model code cannot read them; torch may compute with them and take positions.

Arithmetic with an opaque number gives an opaque number. Any other use counts as a decision. C code
reads numbers without calling methods. It therefore finds a value that is far too large in one trace
and far too small in another, and behaves differently in at least one of them. Tensors that torch
computes with an opaque number have no known value. A dim that is sliced or indexed at an opaque
position, or has an opaque length, is never sharded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.record.op_tensors import tensors_in
from shardwright.planner.trace.sizes.provenance import Provenance, SourcedInt
from shardwright.planner.trace.sizes.size_facts import sizes_given

FACTORS = frozenset(
    """
mul mul_ multiply add add_ sub sub_ subtract rsub __rsub__ div div_ divide true_divide __rdiv__
__rtruediv__
""".split()
)
"""Torch functions that do the same for any number."""

VALUED = frozenset(
    """
arange tensor full_like fill_ masked_fill masked_fill_ triu triu_ tril tril_ clamp pow __pow__
__rpow__ remainder __mod__ fmod floor_divide __floordiv__ eq ne lt le gt ge __eq__ __ne__ __lt__
__le__ __gt__ __ge__
""".split()
)
"""Torch functions whose elements depend on a number. Their rule may depend on whether it is 0."""

SIZED = frozenset("zeros ones full empty new_zeros new_ones new_full new_empty".split())
"""Torch functions that take numbers as sizes of a new tensor, or as its elements."""

PLACED = frozenset("__getitem__ __setitem__ narrow select".split())
"""Torch functions that take numbers as positions in a dim."""

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
    """Mode in which torch functions get the real values; at most `most` calls are allowed.

    Attributes:
        general: Whether a number was used in a way for which the value may matter to rules: traces
            with other values must be compared.
    """

    def __init__(self, asked: list[Any], most: int) -> None:
        super().__init__()
        self.asked, self.left, self.general = asked, most, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; an opaque number that it may not have is a decision."""
        kwargs, self.left = kwargs or {}, self.left - 1
        if self.left < 0:
            self.asked.append(None)
            raise Decided("code loops over a number that it is given")
        found = next(_hidden((args, kwargs)), None)
        if found is None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name not in FACTORS:
            self.general = True
            if name not in PLACED | VALUED | SIZED:
                _decides(found)
        out = func(*_shown(args), **_shown(kwargs))
        if name in PLACED:
            taken, left = _dims_at(name, found, *args, **kwargs)
            self._cut(*((args[0], taken) if _is_fake(args[0]) else (out, left)))
        if name == "arange":
            self._cut(out, [0])
        if name in SIZED:
            sizes, skip = sizes_given(name, args, kwargs, out)
            self._cut(out, [skip + i for i, n in enumerate(sizes) if isinstance(n, Hidden)])
        for x in tensors_in((out, args[:1])):
            if (fakes := getattr(inner(x), "fake_mode", None)) is not None:
                fakes.known.drop(inner(x))
        return out

    def _cut(self, x: Tensor, dims: Collection[int]) -> None:
        """Note that these dims of a tensor are never sharded."""
        if not _is_fake(x):
            self.asked.append(None)
            raise Decided("code writes to a constant at a place that it is given")
        inner(x).fake_mode.cut.extend((inner(x), dim) for dim in dims)


def _is_fake(x: Any) -> bool:
    """Return whether the trace follows a tensor; else it is a constant, which is never sharded."""
    return getattr(inner(x), "fake_mode", None) is not None


def _dims_at(
    name: str, found: Hidden, x: Tensor, *args: Any, **kwargs: Any
) -> tuple[list[int], list[int]]:
    """Return the dims of `x` in which a function of `PLACED` takes opaque positions.

    And those dims of its result that have opaque lengths.
    """
    if name in ("narrow", "select"):
        dim = args[0] if args else kwargs.get("dim")
        dims = [dim % x.dim()] if type(dim) is int else _decides(found)
        return dims, dims if name == "narrow" else []
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    taken = [p for p in index if p is not None and p is not Ellipsis]
    unclear = (list, bool) if _is_fake(x) else (list, bool, Tensor)  # tensors may move dims
    if any(isinstance(p, unclear) or _is_mask(p) for p in taken):
        _decides(found)
    dims, left, at, to = [], [], 0, 0
    for part in index:
        if part is Ellipsis:
            at, to = at + x.dim() - len(taken), to + x.dim() - len(taken)
            continue
        if any(True for _ in _hidden(part)):
            dims.append(at)
            left += [to] if isinstance(part, slice) else []
        at, to = at + (part is not None), to + (part is None or isinstance(part, slice))
    return dims, left


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)


def _shown(value: Any) -> Any:
    """Return arguments with the values of opaque numbers."""
    if isinstance(value, Hidden):
        return value.value
    if isinstance(value, slice):
        return slice(*map(_shown, (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {key: _shown(part) for key, part in value.items()}
    if isinstance(value, torch.Size) or type(value) in (tuple, list):
        return type(value)([_shown(part) for part in value])
    return value


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
