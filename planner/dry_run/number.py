"""A number that notes whether code asks what it is: compares it, computes with it, looks it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KEPT = frozenset(
    """
__class__ __new__ __init__ __getattribute__ __setattr__ __delattr__ __init_subclass__ __doc__
__subclasshook__ __dir__ __sizeof__ __getnewargs__ __reduce__ __reduce_ex__ __getstate__
""".split()
)
"""What of `int` does not depend on the number."""


class Number:
    """An integer for code that is handed it; not an `int`, which lists take without asking."""

    def __init__(self, value: int, asked: Callable[[], None]) -> None:
        self._value, self._asked = value, asked

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """What `isinstance` is told."""
        return int

    def __deepcopy__(self, memo: Any) -> Number:
        return self

    def __getattr__(self, name: str) -> Any:
        self._asked()
        return getattr(self._value, name)


def _asking(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self._asked()
        return getattr(self._value, name)(*args)

    return method


for _name in dir(int):
    if _name.startswith("__") and _name not in KEPT and callable(getattr(int, _name)):
        setattr(Number, _name, _asking(_name))
