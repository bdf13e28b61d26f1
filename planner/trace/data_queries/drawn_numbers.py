"""Numbers that code draws with Python's `random` and compares with others: whether to drop a layer.

Ranks may draw others than each other. That does not matter where each of them compares alike, as
with a share of layers to drop that is 0. So while a model is traced such a number is a stand-in
that knows no more of itself than between which two it lies.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from shardwright.errors import ModelError


def refusal() -> ModelError:
    """What is raised where it matters what was drawn."""
    return ModelError("it draws random numbers of Python or NumPy")


class DrawnNumber:
    """A number from `low` to `high`, both included."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = min(low, high), max(low, high)

    def __lt__(self, other: Any) -> bool:
        return _decided(other, self.high < _number(other), self.low >= other)

    def __le__(self, other: Any) -> bool:
        return _decided(other, self.high <= _number(other), self.low > other)

    def __gt__(self, other: Any) -> bool:
        return not self <= other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def _used(self, *_: Any) -> Any:
        raise refusal()

    __bool__ = __float__ = __int__ = __index__ = __hash__ = __eq__ = __ne__ = _used  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __format__ = _used
    __truediv__ = __rtruediv__ = __getattr__ = _used


def _number(value: Any) -> float:
    if isinstance(value, (int, float)):
        return value
    raise refusal()


def _decided(other: Any, always: bool, never: bool) -> bool:
    """Whether it is so, whatever was drawn.

    Raises:
        ModelError: it depends.
    """
    if always or never:
        return always
    raise refusal()


def standing_in(value: Any, active: Callable[[], bool]) -> Any:
    """What stands in for a global `value` of model code that draws such numbers; None for others.

    It does while it is `active`; else it draws.
    """
    if value is random:
        return SimpleNamespace(
            **{
                **vars(random),
                "random": _drawing(random.random, active),
                "uniform": _drawing(random.uniform, active),
            }
        )
    drawn = value is random.random or value is random.uniform
    return _drawing(value, active) if drawn else None


def _drawing(draw: Callable[..., float], active: Callable[[], bool]) -> Callable[..., Any]:
    def drawn(*args: Any, **kwargs: Any) -> Any:
        ends = (*args, *kwargs.values()) or (0.0, 1.0)
        return DrawnNumber(*map(_number, ends)) if active() else draw(*args, **kwargs)

    return drawn
