"""Stand-ins that model code gets for numbers that depend on data, and for row numbers in loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from shardwright.planner.trace.data_queries.errors import NeedsData

COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")


def _refuses(names: str) -> Callable[[type], type]:
    """Return a class decorator whose class raises `NeedsData` in these special methods."""

    def used(*_: Any) -> NoReturn:
        raise NeedsData("it computes with a number that only data has")

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


for _name in COMPARISONS:
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


class RowUses:
    """Notes how loop passes use their row number, to find the passes that represent all others.

    If a row number is only compared and used to select from tensors, then passes whose rows lie on
    the same side of all compared numbers make the same calls.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.bounds = {0}
        self.matters = False
        """Whether the row number is used in another way, so that each pass may differ."""

    def compared(self, bound: int) -> None:
        """Note a number that the row number is compared with."""
        self.bounds |= {bound, bound + 1}

    def used(self) -> None:
        """Note that the row number is used in another way."""
        self.matters = True

    def numbers(self) -> Iterator[int]:
        """Yield one row number per distinct kind of pass, as far as uses are known by then."""
        done = set[int]()
        while left := (set(range(self.count)) if self.matters else self.bounds) - done:
            done.add(number := min(left))
            if 0 <= number < self.count:
                yield number


class RowNumber(WatchedNumber):
    """The row number of a loop pass, which notes its uses."""

    def __init__(self, value: int, uses: RowUses) -> None:
        super().__init__(value, uses.used)
        self.uses = uses


@contextmanager
def int_keeps_rows(names: dict[str, Any]) -> Iterator[None]:
    """Context manager in which `int(row_number)` stays a `RowNumber` in code with these globals."""

    class Kind(type):
        def __call__(cls, *args: Any) -> Any:
            return args[0] if args and type(args[0]) is RowNumber else int(*args)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, int)

    before = {name: names[name] for name in ("int",) if name in names}
    names["int"] = Kind("int", (int,), {})
    try:
        yield
    finally:
        del names["int"]
        names.update(before)


def _comparing(name: str) -> Callable[[RowNumber, Any], bool]:
    def compare(self: RowNumber, other: Any) -> bool:
        if isinstance(other, int):
            self.uses.compared(int(other))
        else:
            self.uses.used()
        return getattr(self.value, name)(other)

    return compare


for _name in COMPARISONS:
    setattr(RowNumber, _name, _comparing(_name))
