"""Functions of plain numbers that draw with Python or NumPy and give an array: what to mask, say.

Of what is drawn there only the values in that array hang, if nothing is done with it but to make a
tensor of it. So while a model is traced such a function gives a stand-in with which nothing else
can be done. All ranks are given the same numbers, and draw the same. What draws in any other way
is refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import get_ident
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from shardwright.planner.trace.data_queries.drawn_numbers import refusal, standing_in

OTHERS = 3
"""How many arrays more are drawn, to see that all are of one shape."""

PLAIN = (type(None), bool, int, float, str)


class Draws:
    """What is drawn in one thread.

    Attributes:
        arrays: Whether arrays were drawn so far.
        within: Whether a function that may draw one runs.
    """

    def __init__(self) -> None:
        self.arrays = self.within = False
        self._thread = get_ident()

    @property
    def numbers(self) -> bool:
        """Whether a number that is drawn is one by itself."""
        return not self.within and get_ident() == self._thread


class DrawnArray:
    """Stands in for an array whose values come from a generator."""

    def __init__(self, array: Any) -> None:
        self.__dict__["_like"] = array

    def tensor(self, make: Callable[..., Tensor], options: dict[str, Any]) -> Tensor:
        """What `make` makes of such an array; of its values nobody knows."""
        return make(self.__dict__["_like"], **options)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore  # code that asks goes on as with an array
        return type(self.__dict__["_like"])

    def _used(self, *_: Any) -> Any:
        raise refusal()

    __getattr__ = __bool__ = __len__ = __iter__ = __getitem__ = __array__ = _used
    __eq__ = __hash__ = __and__ = __or__ = __invert__ = __add__ = __mul__ = _used  # type: ignore[assignment]


@contextmanager
def drawn_arrays(root: nn.Module) -> Iterator[Draws]:
    """Within, and in this thread, code of `root` is given stand-ins for arrays that it draws.

    And for numbers (`drawn_numbers.py`).

    Raises:
        ModelError: behind it, that others were drawn than those of torch and such.
    """
    draws, before = Draws(), _states()
    with ExitStack() as undo:
        files = {sys.modules.get(type(module).__module__) for module in root.modules()}
        for names in [vars(file) for file in files if file is not None]:
            for name, function in [*names.items()]:
                if isinstance(function, FunctionType) and _may_draw(function.__code__):
                    new = _stand_in(function, draws)
                else:
                    new = standing_in(function, lambda: draws.numbers)
                if new is not None:
                    undo.callback(names.__setitem__, name, function)
                    names[name] = new
        yield draws
    if _states() != before:
        raise refusal()


def _may_draw(code: CodeType) -> bool:
    within = (part for part in code.co_consts if isinstance(part, CodeType))
    return "random" in code.co_names or any(map(_may_draw, within))


def _stand_in(function: Callable[..., Any], draws: Draws) -> Callable[..., Any]:
    thread = get_ident()

    @wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        before, outer = _states(), draws.within
        draws.within = outer or get_ident() == thread
        try:
            found = function(*args, **kwargs)
            if get_ident() != thread or _states() == before or not all(map(_is_plain, given)):
                return found
            others = [function(*args, **kwargs) for _ in range(OTHERS)]
        finally:
            if get_ident() == thread:
                draws.within = outer
        _put_back(before)
        if any(_kind(other) != _kind(found) for other in others) or not _kind(found):
            raise refusal()
        _count(given)
        draws.arrays = True
        return DrawnArray(found)

    return draw


def _kind(value: Any) -> Any:
    """What is the same of all arrays that a function draws; None of what is no array."""
    return (value.shape, value.dtype) if hasattr(value, "__array__") else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (
        isinstance(value, (tuple, list)) and all(map(_is_plain, value))
    )


def _count(value: Any) -> None:
    """Sizes among the numbers stay those of the whole: what is drawn depends on them."""
    if isinstance(value, (tuple, list)):
        for part in value:
            _count(part)
    elif isinstance(value, int):
        float(value)


def _states() -> tuple[Any, ...]:
    """Where the generators of Python and NumPy stand."""
    numpy: Any = sys.modules.get("numpy")
    kind, keys, *rest = numpy.random.get_state() if numpy else (None, b"")
    return random.getstate(), kind, bytes(keys), *rest


def _put_back(states: tuple[Any, ...]) -> None:
    numpy: Any = sys.modules["numpy"]
    python, kind, keys, *rest = states
    random.setstate(python)
    numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
