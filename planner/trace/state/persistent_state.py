"""State that modules keep in plain attributes from one call to the next.

If a run leaves something in attributes, the same call is traced again after it, with what the first
left. Tensors then flow from one call to the other like any tensors, and the plan proves that a call
leaves them with the placement that it found. If other values are the same too, the next call works
like this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.planner.trace.data_queries.errors import Unproven
from shardwright.planner.trace.queries.opaque_ints import Decided, Shows, hidden
from shardwright.planner.trace.record.boundaries import NUMBERS
from shardwright.planner.trace.runs.run import Run, in_mode
from shardwright.planner.trace.sizes.provenance import seen_by_users
from shardwright.planner.trace.state.attribute_contents import NOT_KEPT
from shardwright.planner.trace.state.attribute_reads import (
    Look,
    Place,
    alike,
    is_one_number,
    like,
    look,
    plain,
    same,
)
from shardwright.planner.trace.state.hidden_attributes import HIDDEN, hidden_until_asked

MAX_CALLS = 100_000
"""The most torch functions that may be called in a run with hidden numbers."""


class Keeps(Unproven):
    """Code reads state of an earlier call, and it is not proven that further calls do the same."""

    def __init__(self, place: Place) -> None:
        super().__init__(
            f"it keeps '{place}' from call to call, and it cannot be proven what a later call does "
            "with it: compute it in each call, pass it in and return it, or, if it is a number, "
            "move the code that keeps it into a submodule, which then stays replicated"
        )
        self.place = place


class Retrace(Exception):
    """The trace must be made again, with more numbers hidden or hidden with the other sign."""


class KeptNumbers:
    """Numbers in attributes that differ after each call, such as counters: hidden from code.

    Attributes:
        places: The attributes with these numbers.
        sign: How they are hidden in this trace (see `opaque_ints.py`); 0 if they are not hidden.
        written: Buffers of one number that runs write: no value of theirs is taken as known.
    """

    def __init__(self) -> None:
        self.places: set[Place] = set()
        self.sign = 0
        self.written: set[str] = set()
        self._ops: list[Any] | None = None

    def are_in(self, places: set[Place]) -> None:
        """Add attributes with such numbers.

        Raises:
            Retrace: `places` has new attributes, which must be hidden in another trace.
        """
        if not places <= self.places:
            self.places |= places
            self.sign, self._ops = -1, None
            raise Retrace

    def are_written(self, names: Set[str]) -> None:
        """Add buffers that a run wrote.

        Raises:
            Retrace: there are any: their values must not be known in another trace.
        """
        if names:
            self.written |= names
            raise Retrace

    def made(self, ops: list[Any]) -> bool:
        """Compare the ops of a trace with those of the trace before; False if they differ.

        Raises:
            Retrace: the trace must be made again with the numbers hidden with the other sign.
        """
        if self._ops is not None and self._ops != ops:
            return False
        if self.sign == -1:
            self.sign, self._ops = 1, ops
            raise Retrace
        return True


class Made(NamedTuple):
    """A finished run.

    Attributes:
        training: Whether it was in training mode.
        plain: Whether it is the first run in its mode, or marked as `again`.
        before: The attributes before the run.
        after: The attributes after the run.
    """

    training: bool
    plain: bool
    before: Look
    after: Look


class Contained(NamedTuple):
    """A tensor in an attribute after a run; `at` is the number of op calls made by then."""

    place: Place
    slot: str
    tensor: Tensor
    at: int


class KeptState:
    """Tracks module attributes while runs of `root` are traced, one after the other.

    With `keeps`, reads of attributes that earlier runs left are noted.

    Attributes:
        left: Attributes that any run left different from before the first run.
        asked: Attributes that code read that held tensors at first, or that a run had left.
        contained: Floating tensors that runs left in attributes, also inside containers or objects.
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
        self.numbers, self.keeps, self.asked = numbers, keeps, set[Place]()
        self.left, self.contained = set[Place](), list[Contained]()
        self._start, self._first = look(self.modules, HIDDEN), dict(self._attributes())
        self._from_start = {id(x) for found in self._start.values() for _, x in found}
        self._tensors = {(p, s): x for p, f in self._start.items() for s, x in f if _is_real(x)}
        self._made: list[Made] = []
        self._made_calls = made_calls
        self._asked: dict[Place, list[Any]] = {}

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Context manager around `run`; with `keeps`, reads of what earlier runs left are noted.

        Raises:
            Keeps: code branches on a number that an earlier run left.
        """
        if not self.keeps or run.resumes or run.fills:
            yield
            self._note(look(self.modules, HIDDEN))
            return
        before = look(self.modules, HIDDEN)
        first = run.training not in {m.training for m in self._made}
        try:
            with self._hiding(self.left | {place for place, _ in self._tensors}):
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
        """Yield the attributes of all modules that may hold state."""
        for path, module in self.modules.items():
            for name, value in vars(module).items():
                if name not in NOT_KEPT and name != HIDDEN:
                    yield Place(path, name), value

    def _note(self, now: Look) -> None:
        """Note the attributes that differ from before the first run."""
        places, start = {**self._start, **now}, self._start
        left = {p for p in places if not alike(start.get(p), now.get(p), same)}
        for place, value in self._attributes():  # users may read these: they must not be local
            if place in left or value is not self._first.get(place):
                seen_by_users(value)
        self.left |= left
        self.contained += [
            Contained(place, slot, x, self._made_calls())
            for place, found in now.items()
            for slot, x in found
            if _is_real(x) and id(x) not in self._from_start
        ]

    @property
    def read(self) -> set[Place]:
        """The attributes that runs left otherwise than they were, and that code read."""
        return self.asked & self.left

    def leaves_numbers(self) -> bool:
        """Return whether runs left other numbers or names in attributes than there were before."""
        now = look(self.modules, HIDDEN)
        found = (x for place in self.left for _, x in now.get(place, ()))
        return any(isinstance(x, NUMBERS) for x in found)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of tensors that two runs leave in one attribute that code reads."""
        yield from ((was, now) for _, was, now in self._pairs())

    def _pairs(self) -> Iterator[tuple[Place, Tensor, Tensor]]:
        read = sorted(self.read)
        begun = [(p, s, x) for m in self._made for p in read for s, x in m.before.get(p, ())]
        later = {(p, s) for p, s, x in begun if x is not self._tensors.get((p, s), x)}
        # What no run went on with must be as what the first run found.
        first = {at: x for at, x in self._tensors.items() if at not in later}
        for made in self._made:
            for place in read:
                for slot, now in made.after.get(place, ()):
                    if _is_real(now) and now.numel():
                        was = first.setdefault((place, slot), now)
                        if was is not now and was.dim() == now.dim():
                            yield place, was, now

    def changed(self) -> set[str]:
        """Return the modules whose attributes that code reads differ after each run."""
        tensors = (place for place, _, _ in self._pairs())
        return {place.path for place in (*self.numbers.places, *tensors)}

    def check(self) -> None:
        """Check that for each state that a run leaves, a run was made from a state like it.

        Only attributes that code reads are compared. If there are runs in both modes, the state
        that the last run leaves for training mode is checked too.

        Raises:
            Keeps: no run was made from the state that some run left.
            Retrace: numbers must be hidden first.
        """
        modes = {m.training for m in self._made}
        left = [(m.training, m.after) for m in self._made]
        if len(modes) > 1:  # the last run was in eval mode; training mode would follow it
            with in_mode(self.modules[""], True):
                left.append((True, look(self.modules, HIDDEN)))
        for training, after in left:
            found = [m.before for m in self._made if m.plain and m.training is training]
            unlike = min((self._unlike(after, each) for each in found), key=len)
            for place in unlike:
                looks = [after, *(m.before for m in self._made)]
                if not all(is_one_number(look.get(place)) for look in looks):
                    raise self._keeps(place)
            self.numbers.are_in({*unlike})

    def _unlike(self, one: Look, other: Look) -> list[Place]:
        """Return the attributes that code reads and that differ between two looks."""
        free = {
            p
            for p in self.numbers.places
            if is_one_number(one.get(p)) and is_one_number(other.get(p))
        }
        places = sorted(self.read - free)
        return [p for p in places if not alike(one.get(p), other.get(p), like)]

    def _decided(self) -> Iterator[Place]:
        """Yield the attributes with numbers that code branches on."""
        return (place for place, asked in self._asked.items() if asked)

    def _keeps(self, place: Place) -> Keeps:
        parts = place.path.split(".") if place.path else []
        self.entered[:] = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
        return Keeps(place)

    @contextmanager
    def _hiding(self, places: set[Place]) -> Iterator[None]:
        """Note reads of `places`, and hide the numbers there that are in `KeptNumbers`."""
        sign = self.numbers.sign

        def found(place: Place, value: Any) -> Any:
            self.asked.add(place)
            if not sign or place not in self.numbers.places:
                return value
            return hidden(plain(value), sign, self._asked.setdefault(place, []))

        shows = Shows([], MAX_CALLS) if sign else nullcontext()
        try:
            with hidden_until_asked(self.modules, places, found), shows:
                yield
        finally:
            for path, name in self.numbers.places:
                if name in (kept := vars(self.modules[path])):
                    kept[name] = plain(kept[name])


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
