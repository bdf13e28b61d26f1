"""What modules keep in plain attributes from one call for the next.

Of a module that leaves something there the same call is traced again, behind the first, with what
that left: so tensors go from the one to the other like any others, and it is proven that what a
call leaves lies as what it found. If it leaves the same besides, the next call is as this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.planner.contract.plain_values import is_plain
from shardwright.planner.trace.data_dependent.loops import inner
from shardwright.planner.trace.data_dependent.unknown import Unknown
from shardwright.planner.trace.hidden_numbers import Decided, Hidden, Shows, hidden
from shardwright.planner.trace.kept_contents import NOT_KEPT
from shardwright.planner.trace.provenance import SourcedInt
from shardwright.planner.trace.traced_calls import Run, in_mode
from shardwright.runtime.noticed.changes import is_config
from shardwright.runtime.noticed.contents import CODE, DEEPEST

OURS = "_shardwright_hidden"
"""The attribute with what is hidden from code until it asks."""

LARGEST = 1000
"""What is looked at in an attribute."""

MOST = 100_000
"""Functions of torch that a call with a hidden number may call."""


class Place(NamedTuple):
    """An attribute of a module."""

    path: str
    name: str

    def __str__(self) -> str:
        return ".".join(filter(None, self))


Look = dict[Place, list[tuple[str, Any]]]
"""What is in attributes: values, by where they are in it."""


class Keeps(Unknown):
    """Code goes on with what another call left, which is not proven to end."""

    def __init__(self, place: Place) -> None:
        super().__init__(
            f"it keeps '{place}' from call to call, and what a call does with that of another "
            "nobody can prove: make it anew in each call, give it in and out, or put the code that "
            "keeps it into a module within, which then stays whole"
        )
        self.place = place


class Retrace(Exception):
    """A trace is to be made again, with more numbers hidden, or others in their place."""


class KeptNumbers:
    """Numbers that each call leaves another of: hidden from code, in one trace after the other.

    Attributes:
        places: Where they are.
        sign: How they are hidden in this trace (see `hidden_numbers.py`); 0 if they are not.
    """

    def __init__(self) -> None:
        self.places: set[Place] = set()
        self.sign = 0
        self._ops: list[Any] | None = None

    def are_in(self, places: set[Place]) -> None:
        """Numbers are in these `places`, too.

        Raises:
            Retrace: the trace is to be made with them hidden.
        """
        if not places <= self.places:
            self.places |= places
            self.sign, self._ops = -1, None
            raise Retrace

    def made(self, ops: list[Any]) -> bool:
        """Take in what a trace called; False if it is not what one before it did.

        Raises:
            Retrace: it is to be made with them hidden in the other way.
        """
        if self._ops is not None and self._ops != ops:
            return False
        if self.sign == -1:
            self.sign, self._ops = 1, ops
            raise Retrace
        return True


class Made(NamedTuple):
    """A run that was made.

    Attributes:
        training: In training mode.
        plain: The first in this mode, or that again.
        before: What it found.
        after: What it left.
    """

    training: bool
    plain: bool
    before: Look
    after: Look


class KeptState:
    """What is kept in attributes while runs of `root` are traced, one after the other.

    Where any of these `keeps` something, reads of that are noted.

    Attributes:
        left: Where any run left something else than was before the first.
        read: Where code found what another run left.
    """

    def __init__(
        self, root: nn.Module, entered: list[str], numbers: KeptNumbers, keeps: bool
    ) -> None:
        self.modules, self.entered = dict(root.named_modules()), entered
        self.numbers, self.keeps, self.read = numbers, keeps, set[Place]()
        self.left = set[Place]()
        self._start = self._look()
        self._made: list[Made] = []
        self._asked: dict[Place, list[Any]] = {}

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Within, `run` is made; if anything is kept, reads of what others left are noted.

        Raises:
            Keeps: code decides by a number that it finds there.
        """
        if not self.keeps or run.resumes or run.fills:
            yield
            self._note(self._look())
            return
        before, first = self._look(), run.training not in {m.training for m in self._made}
        try:
            with _watched(), self._hidden(self.left):
                yield
        except Decided:
            raise self._keeps(next(self._decided(), min(self.numbers.places))) from None
        for place in self._decided():
            raise self._keeps(place)
        self._made.append(Made(run.training, first or run.again, before, self._look()))
        self._note(self._made[-1].after)

    def _note(self, now: Look) -> None:
        """Note where something else is than before the first run."""
        places, start = {**self._start, **now}, self._start
        self.left |= {p for p in places if not _alike(start.get(p), now.get(p), _same)}

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tensors that runs leave in one place where code reads."""
        first: dict[tuple[Place, str], Tensor] = {}
        for made in self._made:
            for place in sorted(self.read):
                for slot, now in made.after.get(place, ()):
                    if isinstance(now, Tensor) and now.is_floating_point() and now.numel():
                        was = first.setdefault((place, slot), now)
                        if was is not now and was.dim() == now.dim():
                            yield was, now

    def check(self) -> None:
        """Check that calls were made with all that any of them leaves, as far as code reads it.

        What one leaves in eval mode for those in training mode, that the last one does.

        Raises:
            Keeps: none was with what one left.
            Retrace: numbers are to be hidden first.
        """
        modes = {m.training for m in self._made}
        left = [(m.training, m.after) for m in self._made]
        if len(modes) > 1:  # the last run was not in training mode; it is told to train then
            with in_mode(self.modules[""], True):
                left.append((True, self._look()))
        for training, after in left:
            found = [m.before for m in self._made if m.plain and m.training is training]
            unlike = min((self._unlike(after, each) for each in found), key=len)
            for place in unlike:
                if not (_is_number(after.get(place)) and self._is_count(place)):
                    raise self._keeps(place)
            self.numbers.are_in({*unlike})

    def _is_count(self, place: Place) -> bool:
        """Whether only numbers were found there."""
        return all(_is_number(m.before.get(place)) for m in self._made)

    def _unlike(self, one: Look, other: Look) -> list[Place]:
        """Where code reads what is not alike in two looks."""
        free = {
            p for p in self.numbers.places if _is_number(one.get(p)) and _is_number(other.get(p))
        }
        places = sorted(self.read - free)
        return [p for p in places if not _alike(one.get(p), other.get(p), _like)]

    def _decided(self) -> Iterator[Place]:
        """Where numbers are by which code decides."""
        return (place for place, asked in self._asked.items() if asked)

    def _keeps(self, place: Place) -> Keeps:
        parts = place.path.split(".") if place.path else []
        self.entered[:] = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
        return Keeps(place)

    def _look(self) -> Look:
        with torch._C.DisableTorchFunction():  # no code of the model asks
            return {
                Place(path, name): [*islice(_leaves(value, ""), LARGEST)]
                for path, module in self.modules.items()
                for name, value in [*vars(module).items()]
                if name not in NOT_KEPT and name != OURS
            }

    @contextmanager
    def _hidden(self, places: set[Place]) -> Iterator[None]:
        """Within, what is in these `places` is not there until code asks for it."""
        sign = self.numbers.sign

        def read(place: Place, value: Any) -> Any:
            self.read.add(place)
            if not sign or place not in self.numbers.places:
                return value
            return hidden(_plain(value), sign, self._asked.setdefault(place, []))

        changed = [self.modules[path] for path in {place.path for place in places}]
        for place in places:
            module = self.modules[place.path]
            if place.name in vars(module):
                value = vars(module).pop(place.name)
                hides = vars(module).setdefault(OURS, {})
                hides[place.name] = (value, lambda value, place=place: read(place, value))
                if hasattr(type(module), place.name):  # nobody would be asked
                    _show(module, place.name)
        try:
            with Shows([], MOST) if sign else nullcontext():
                yield
        finally:
            for module in changed:
                for name, (value, _) in vars(module).pop(OURS, {}).items():
                    vars(module).setdefault(name, value)
            for path, name in self.numbers.places:
                if name in (kept := vars(self.modules[path])):
                    kept[name] = _plain(kept[name])


@contextmanager
def _watched() -> Iterator[None]:
    """Within, modules give what is hidden to who asks for it."""
    before = nn.Module.__getattr__

    def get(self: nn.Module, name: str) -> Any:
        hides = vars(self).get(OURS)
        return _show(self, name) if hides and name in hides else before(self, name)

    nn.Module.__getattr__ = get  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.__getattr__ = before  # type: ignore[method-assign]


def _show(module: nn.Module, name: str) -> Any:
    value, read = vars(module)[OURS].pop(name)
    vars(module)[name] = value = read(value)
    return value


def _leaves(value: Any, slot: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What is in a value, by where it is; tensors as they are at present."""
    if isinstance(value, Tensor):
        yield slot, inner(value)
        return
    value, kind, parts = _plain(value), type(value), None
    if isinstance(value, (list, tuple, deque)):
        value, parts = (kind, len(value)), enumerate(value)
    elif isinstance(value, dict):
        value, parts = (kind, len(value)), value.items()
    elif isinstance(value, (set, frozenset)):
        value = frozenset(value)
    elif not (is_plain(value) or isinstance(value, (*CODE, nn.Module)) or is_config(value)):
        parts = getattr(value, "__dict__", {}).items()
    yield slot, value
    for key, part in [*islice(parts, LARGEST)] if parts is not None and depth < DEEPEST else ():
        yield from _leaves(part, f"{slot}.{key if is_plain(key) else type(key)}", depth + 1)


def _alike(one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Whether two looks at an attribute saw the same."""
    if one is None or other is None or len(one) != len(other):
        return one is other
    pairs = zip(one, other, strict=True)
    return all(a[0] == b[0] and same(a[1], b[1]) for a, b in pairs)


def _same(one: Any, other: Any) -> bool:
    """Whether a value is what it was."""
    if one is other or isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # of arrays, say
        return False


def _like(one: Any, other: Any) -> bool:
    """Whether code does the same with both, as far as it looks no further than at what they are."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.dim() == other.dim()
    objects = (
        type(one) is type(other) and not is_plain(one) and bool(getattr(one, "__dict__", None))
    )
    return objects or _same(one, other)


def _plain(value: Any) -> Any:
    """A number that remembers where it comes from, or is hidden, as others are."""
    value = value.value if isinstance(value, Hidden) else value
    return int(value) if isinstance(value, SourcedInt) else value


def _is_number(look: Any) -> bool:
    """Whether nothing but an integer or a float was seen."""
    one = look[0][1] if look and len(look) == 1 else None
    return isinstance(one, (int, float)) and not isinstance(one, bool)
