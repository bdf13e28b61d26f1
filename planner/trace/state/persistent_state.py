"""What modules keep in plain attributes from one call for the next.

Of a module that leaves something there the same call is traced again, behind the first, with what
that left: so tensors go from the one to the other like any others, and it is proven that what a
call leaves lies as what it found. If it leaves the same besides, the next call is as this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.planner.trace.data_queries.errors import Unproven
from shardwright.planner.trace.queries.opaque_ints import Decided, Shows, hidden
from shardwright.planner.trace.runs.run import Run, in_mode
from shardwright.planner.trace.sizes.provenance import seen_by_users
from shardwright.planner.trace.state.attribute_contents import NOT_KEPT
from shardwright.planner.trace.state.attribute_reads import (
    Look,
    Place,
    alike,
    is_number,
    like,
    look,
    plain,
    same,
)
from shardwright.planner.trace.state.hidden_attributes import HIDDEN, hidden_until_asked

MOST = 100_000
"""Functions of torch that a call with a hidden number may call."""


class Keeps(Unproven):
    """Code goes on with what another call left, which is not proven to end."""

    def __init__(self, place: Place) -> None:
        super().__init__(
            f"it keeps '{place}' from call to call, and what a call does with that of another "
            "nobody can prove: make it anew in each call, give it in and out, or put the code that "
            "keeps it, if it is a number, into a module within, which then stays whole"
        )
        self.place = place


class Retrace(Exception):
    """A trace is to be made again, with more numbers hidden, or others in their place."""


class KeptNumbers:
    """Numbers that each call leaves another of: hidden from code, in one trace after the other.

    Attributes:
        places: Where they are.
        sign: How they are hidden in this trace (see `opaque_ints.py`); 0 if they are not.
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


class Contained(NamedTuple):
    """A tensor in what an attribute holds, behind a run: when so many calls of ops were made."""

    place: Place
    slot: str
    tensor: Tensor
    at: int


class KeptState:
    """What is kept in attributes while runs of `root` are traced, one after the other.

    Where any of these `keeps` something, reads of that are noted.

    Attributes:
        left: Where any run left something else than was before the first.
        read: Where code found what another run left.
        contained: Tensors that runs left, in lists, tables and objects, too.
    """

    def __init__(
        self,
        root: nn.Module,
        entered: list[str],
        numbers: KeptNumbers,
        keeps: bool,
        made_calls: Callable[[], int],
    ) -> None:
        self.modules, self.entered = dict(root.named_modules()), entered
        self.numbers, self.keeps, self.read = numbers, keeps, set[Place]()
        self.left, self.contained = set[Place](), list[Contained]()
        self._start, self._first = look(self.modules, HIDDEN), dict(self._attributes())
        self._from_start = {id(x) for found in self._start.values() for _, x in found}
        self._made: list[Made] = []
        self._made_calls = made_calls
        self._asked: dict[Place, list[Any]] = {}

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Within, `run` is made; if anything is kept, reads of what others left are noted.

        Raises:
            Keeps: code decides by a number that it finds there.
        """
        if not self.keeps or run.resumes or run.fills:
            yield
            self._note(look(self.modules, HIDDEN))
            return
        before = look(self.modules, HIDDEN)
        first = run.training not in {m.training for m in self._made}
        try:
            with self._hiding(self.left):
                yield
        except Decided:
            raise self._keeps(next(self._decided(), min(self.numbers.places))) from None
        for place in self._decided():
            raise self._keeps(place)
        self._made.append(
            Made(run.training, first or run.again, before, look(self.modules, HIDDEN))
        )
        self._note(self._made[-1].after)

    def _attributes(self) -> Iterator[tuple[Place, Any]]:
        """What modules have in attributes where numbers may be."""
        for path, module in self.modules.items():
            for name, value in vars(module).items():
                if name not in NOT_KEPT and name != HIDDEN:
                    yield Place(path, name), value

    def _note(self, now: Look) -> None:
        """Note where something else is than before the first run."""
        places, start = {**self._start, **now}, self._start
        left = {p for p in places if not alike(start.get(p), now.get(p), same)}
        for place, value in self._attributes():  # users may read them: numbers of the whole
            if place in left or value is not self._first.get(place):
                seen_by_users(value)
        self.left |= left
        self.contained += [
            Contained(place, slot, x, self._made_calls())
            for place, found in now.items()
            for slot, x in found
            if isinstance(x, Tensor) and x.is_floating_point() and id(x) not in self._from_start
        ]

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
                left.append((True, look(self.modules, HIDDEN)))
        for training, after in left:
            found = [m.before for m in self._made if m.plain and m.training is training]
            unlike = min((self._unlike(after, each) for each in found), key=len)
            for place in unlike:
                if not (is_number(after.get(place)) and self._is_count(place)):
                    raise self._keeps(place)
            self.numbers.are_in({*unlike})

    def _is_count(self, place: Place) -> bool:
        """Whether only numbers were found there."""
        return all(is_number(m.before.get(place)) for m in self._made)

    def _unlike(self, one: Look, other: Look) -> list[Place]:
        """Where code reads what is not alike in two looks."""
        free = {p for p in self.numbers.places if is_number(one.get(p)) and is_number(other.get(p))}
        places = sorted(self.read - free)
        return [p for p in places if not alike(one.get(p), other.get(p), like)]

    def _decided(self) -> Iterator[Place]:
        """Where numbers are by which code decides."""
        return (place for place, asked in self._asked.items() if asked)

    def _keeps(self, place: Place) -> Keeps:
        parts = place.path.split(".") if place.path else []
        self.entered[:] = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
        return Keeps(place)

    @contextmanager
    def _hiding(self, places: set[Place]) -> Iterator[None]:
        """Within, reads of these `places` are noted, and numbers there hidden (`KeptNumbers`)."""
        sign = self.numbers.sign

        def found(place: Place, value: Any) -> Any:
            self.read.add(place)
            if not sign or place not in self.numbers.places:
                return value
            return hidden(plain(value), sign, self._asked.setdefault(place, []))

        shows = Shows([], MOST) if sign else nullcontext()
        try:
            with hidden_until_asked(self.modules, places, found), shows:
                yield
        finally:
            for path, name in self.numbers.places:
                if name in (kept := vars(self.modules[path])):
                    kept[name] = plain(kept[name])
