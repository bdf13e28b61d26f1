"""Values of integer inputs that the user gave: which uses of them hold for any other values.

Only these values were traced. Two kinds of use are safe: sizes and positions that torch functions
get (`GivenNumber`), and anything in a function that sees and returns tensors of integers alone,
which are replicated. After any other use the plan holds for exactly these values.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.planner.trace.sizes.provenance import Provenance, SourcedInt

PLAIN = (int, float, str, type(None), torch.device, torch.dtype)


def only_integers(frame: Any, decides: Callable[[], None]) -> bool:
    """Return whether a function sees tensors of integers only, and changes nothing outside.

    If it returns anything but tensors, `decides` is called then.
    """
    code, values = frame.f_code, frame.f_locals
    given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    owner = given[0] if given and isinstance(given[0], nn.Module) else None
    if any(x.is_floating_point() for x in _tensors(tuple(values.values()))):
        return False
    if not all(x is owner or isinstance(x, (Tensor, *PLAIN)) for x in given):
        return False
    if owner is not None:
        parts = frozenset([*owner._modules, *owner._parameters, *owner._buffers])
        if not _computes_with_integers(type(owner), parts, code):
            return False
    if getattr(frame.f_trace, "watches", None) is None:
        _watch_return(frame, decides)
    return True


@lru_cache(maxsize=256)
def _computes_with_integers(kind: type, parts: frozenset[str], code: CodeType) -> bool:
    """Return whether code of a method, and methods that it names, use no part of its module."""
    seen, todo = {code}, [code]
    while todo:
        one = todo.pop()
        if any(i.opname in STORES for i in dis.get_instructions(one)):
            return False
        named = (getattr(kind, n, None) for n in one.co_names if not hasattr(nn.Module, n))
        codes = [getattr(method, "__code__", None) for method in named]
        more = {c for c in (*one.co_consts, *codes) if isinstance(c, CodeType)} - seen
        seen |= more
        todo += more
    return parts.isdisjoint(name for one in seen for name in one.co_names)


STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
"""Instructions that change something outside of a function."""


def _watch_return(frame: Any, decides: Callable[[], None]) -> None:
    """Call `decides` if the function that `frame` runs returns anything but tensors."""
    before = sys.gettrace()

    def watch(_frame: Any, event: str, result: Any) -> Any:
        if event == "return":
            sys.settrace(before)
            if not _is_tensors(result):
                decides()
        return watch

    watch.watches = True  # type: ignore[attr-defined]
    frame.f_trace, frame.f_trace_lines = watch, False
    sys.settrace(lambda *_: None)


def _is_tensors(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_tensors, value))
    return value is None or isinstance(value, Tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


class GivenNumber(SourcedInt):
    """A number read off given values. Code may compute with it; any other use decides by it.

    Torch functions get its value. It is a `SourcedInt` so that its methods take precedence in
    arithmetic.
    """

    value: int
    decides: Callable[[], None]

    @classmethod
    def read(cls, value: int, decides: Callable[[], None]) -> GivenNumber:
        """Return a number with this value; `decides` is called if code decides by it."""
        out = cls(value)
        out.history, out.provenance = ("constant", int.__int__(out)), Provenance()
        out.value, out.decides = value, decides
        return out


def ranges(frame: Any) -> bool:
    """Return whether code that `frame` runs names `range`, which reads integers unseen."""
    code = frame.f_code
    every = [code, *(c for c in code.co_consts if isinstance(c, CodeType))]
    return any("range" in c.co_names for c in every)


def _computes(function: Callable[[Any, Any], Any], swapped: bool) -> Any:
    def compute(self: GivenNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        ends = self.value, other.value if type(other) is GivenNumber else other
        found = function(*(ends[::-1] if swapped else ends))
        if isinstance(found, int):
            return GivenNumber.read(found, self.decides)
        self.decides()
        return found

    return compute


def _deciding(name: str) -> Any:
    def decide(self: GivenNumber, *others: Any) -> Any:
        self.decides()
        return getattr(self.value, name)(*others)

    return decide


for _name in "add sub mul floordiv mod pow truediv".split():
    setattr(GivenNumber, f"__{_name}__", _computes(getattr(operator, _name), False))
    setattr(GivenNumber, f"__r{_name}__", _computes(getattr(operator, _name), True))
for _name in """
eq ne lt le gt ge bool int float hash neg abs round str repr format divmod rdivmod and or xor rand
ror rxor lshift rshift rlshift rrshift invert floor ceil trunc
""".split():
    setattr(GivenNumber, f"__{_name}__", _deciding(f"__{_name}__"))


def shown(value: Any) -> Any:
    """Return arguments of a torch function with the values of given numbers."""
    if type(value) is GivenNumber:
        return value.value
    if isinstance(value, slice):
        return slice(shown(value.start), shown(value.stop), shown(value.step))
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items()}
    return type(value)(map(shown, value)) if type(value) in (tuple, list) else value
