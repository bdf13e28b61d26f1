"""Stand-ins that model code gets for numbers that depend on data, and integers that note uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from shardwright.planner.trace.data_queries.errors import NeedsData


def _refuses(names: str) -> Callable[[type], type]:
    """Return a class decorator whose class raises `NeedsData` in these special methods."""

    def used(*_: Any) -> NoReturn:
        raise NeedsData("it computes with a number that depends on data")

    def refusing(made: type) -> type:
        for name in names.split():
            setattr(made, f"__{name}__", used)
        return made

    return refusing


@_refuses(
    "int index float hash neg abs round str format and rand or ror xor invert "
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow"
)
class DataNumber:
    """Stand-in for a number that depends on data. Code may take its truth value and compare it."""

    def __init__(self, ask: Callable[[], bool], kind: type) -> None:
        self.ask, self.kind = ask, kind
        self.answer: bool | None = None

    def __bool__(self) -> bool:
        if self.answer is None:
            self.answer = self.ask()
        return self.answer

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore  # for `isinstance` in model code
        return self.kind


for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(DataNumber, _name, lambda self, _: DataNumber(self.ask, bool))


@_refuses("len bool getitem contains eq ne hash add radd mul rmul reversed getattr")
class DataList:
    """Stand-in for the list of row numbers that data selects. Code may only loop over it."""

    def __init__(self, passes: Callable[[], Iterator[Any]]) -> None:
        self.passes = passes

    def __iter__(self) -> Iterator[Any]:
        return self.passes()


KEPT = frozenset(
    """
__class__ __new__ __init__ __getattribute__ __setattr__ __delattr__ __init_subclass__ __doc__
__subclasshook__ __dir__ __sizeof__ __getnewargs__ __reduce__ __reduce_ex__ __getstate__
""".split()
)
"""Methods of `int` that do not depend on the number."""


class WatchedNumber:
    """An integer that notes each use. It is no `int`, which lists accept without a method call."""

    def __init__(self, value: int, asked: Callable[[], None]) -> None:
        self.value, self.asked = value, asked

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """The class that `isinstance` sees."""
        return int

    def __deepcopy__(self, memo: Any) -> WatchedNumber:
        return self

    def __getattr__(self, name: str) -> Any:
        if hasattr(int, name):  # torch looks up other attributes to find out what this is
            self.asked()
        return getattr(self.value, name)


def _asking(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        self.asked()
        return getattr(self.value, name)(*args)

    return method


for _name in dir(int):
    if _name.startswith("__") and _name not in KEPT and callable(getattr(int, _name)):
        setattr(WatchedNumber, _name, _asking(_name))
