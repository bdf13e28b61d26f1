"""Numbers that only data has (`x.tolist()`, `x.max().item()`), while there is no data.

Model code gets a stand-in for such a number, and may do two things with it: cut a tensor into so
many rows (`x.split(counts)`: some sizes are made up, and that dim is never split over ranks), and
ask it a question. One that it goes on from in one way only, because the other way raises (an
assert), is answered so, any other both ways (`branch_paths.py`). It may also select so many rows
(`mask.nonzero()`, `x[mask]`), and make a pass of a loop for each of them (`loops.py`). What is read
must be replicated, so that all ranks read the same. Anything else is `Unknown`: then the module
depends on data as a whole.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwright.planner.trace.data_queries.branch_paths import answer
from shardwright.planner.trace.data_queries.loop_code import (
    Found,
    Refused,
    ends_pass,
    independent,
)
from shardwright.planner.trace.data_queries.loop_rows import rows_to_try
from shardwright.planner.trace.data_queries.loops import Loop, inner, known
from shardwright.planner.trace.data_queries.model_code import model_frame, only_way, truth
from shardwright.planner.trace.data_queries.skips import Skips
from shardwright.planner.trace.data_queries.unknown import Undecided, Unknown
from shardwright.planner.trace.opaque.opaque_modules import Opaque


class Number:
    """A number that only data has."""

    def __init__(self, questions: Questions, kind: type) -> None:
        self.truth, self.kind = Truth(questions), kind

    def _compared(self, _: Any) -> Truth:
        return Truth(self.truth.questions)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared  # type: ignore[assignment]

    def _used(self, *_: Any) -> NoReturn:
        _refuse()

    def __bool__(self) -> bool:
        return bool(self.truth)

    __int__ = __index__ = __float__ = __hash__ = _used  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _used
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _used
    __pow__ = __rpow__ = __abs__ = __round__ = __str__ = __format__ = _used  # type: ignore[assignment]

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # pyright: ignore  # code that asks what it is goes on as with the real one
        return self.kind


class Truth:
    """The answer to a question on such a number."""

    def __init__(self, questions: Questions) -> None:
        self.questions = questions
        self.found: bool | None = None

    def __bool__(self) -> bool:
        if self.found is None:
            self.found = self.questions.answer()
        return self.found

    def _used(self, *_: Any) -> NoReturn:
        _refuse()

    __eq__ = __ne__ = __hash__ = __int__ = __index__ = __float__ = _used  # type: ignore[assignment]
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __invert__ = _used
    __add__ = __radd__ = __mul__ = __rmul__ = _used


class Listed:
    """A list of the rows that data selects, as plain numbers: code may loop over it alone."""

    def __init__(self, passes: Callable[[], Iterator[int]]) -> None:
        self.passes = passes

    def __iter__(self) -> Iterator[int]:
        return self.passes()

    def _used(self, *_: Any) -> NoReturn:
        _refuse()

    __len__ = __bool__ = __getitem__ = __contains__ = __eq__ = __ne__ = __hash__ = _used  # type: ignore[assignment]
    __add__ = __radd__ = __mul__ = __rmul__ = __reversed__ = __getattr__ = _used


def _refuse() -> NoReturn:
    raise Unknown("it computes with a number that only data has")


class Questions:
    """What model code asks of data, and the answers.

    Args:
        opaque: Says whether there are any, and is told if one was given.
        read: Called with each tensor that is read.
        cut: Called with each tensor that is made of as many rows as data says, and that dim.
        now: How many calls were made so far.
        value: The value of a tensor, where it has one without data.
        keep: Called with a tensor that is made of plain numbers, and its value.
        hooked: Called with each tensor whose gradient a hook sees.
    """

    def __init__(
        self,
        opaque: Opaque,
        read: Callable[[Tensor], None] = lambda x: None,
        cut: Callable[[Tensor, int], None] = lambda x, dim: None,
        now: Callable[[], int] = lambda: 0,
        value: Callable[[Tensor], Tensor | None] = lambda x: None,
        keep: Callable[[Tensor, Tensor], None] = lambda x, value: None,
        hooked: Callable[[Tensor], None] = lambda x: None,
    ) -> None:
        self.opaque, self.note_read, self.cut = opaque, read, cut
        self.now, self.value, self.keep = now, value, keep
        self.hooked = hooked
        self.skips = Skips(now)
        self.loops: list[Loop] = []
        self.running: list[tuple[Any, ast.For]] = []
        """The loops that are in a pass, the innermost last, and the frames of their code."""

    def read(self, x: Tensor) -> None:
        """Note that a tensor is read.

        Raises:
            Unknown: nothing is to be read.
        """
        if not self.opaque.stand_ins:
            raise Unknown("it reads numbers off data")
        self.opaque.stood_in = True
        self.note_read(x)

    def answer(self) -> bool:
        """The truth that the code being run does not raise at.

        Raises:
            Unknown: it goes on either way.
        """
        frame = model_frame()
        if frame is None:
            raise Unknown("it branches on data")
        found = only_way(frame.f_code.co_filename, frame.f_lineno)
        if found is None and self.running and self.running[-1][0] is frame:
            test = ends_pass(self.running[-1][1], frame.f_lineno)
            found = None if test is None else truth(test, False)
        if found is None and self.opaque.skips:
            found = self.skips.goes_on(frame)
        if found is None and self.running:
            raise Unknown("it branches on data in a pass of a loop over rows")
        if found is None:
            traced_call, found = answer()
            if found is None:
                raise Undecided(traced_call)
        return found

    def length(self, rows: int) -> int:
        """The number of rows that data selects, where no more than a skip depends on it.

        Raises:
            Unknown: more does.
        """
        frame = model_frame()
        if frame is None or not self.skips.goes_on(frame, rows):
            raise Unknown("it takes the number of rows that data selects")
        return rows

    def passes(self, mask: Tensor, rows: Tensor, listed: bool = False) -> Iterator[Any]:
        """Every row of indices that `mask`, of one dim, may select, in a pass of a loop each.

        As plain numbers where they are `listed`.

        Raises:
            Unknown: a pass may depend on which others there are.
        """
        frame = model_frame()
        if frame is None:
            raise Unknown("it loops over rows that data selects")
        tensors = {n for n, v in frame.f_locals.items() if isinstance(v, Tensor)}
        try:
            found = independent(frame.f_code.co_filename, frame.f_lineno, tensors)
        except Refused as refused:
            raise Unknown(str(refused)) from refused
        loop = Loop(inner(mask))
        self.loops.append(loop)
        made = (lambda i: i) if listed else torch.tensor if rows.dim() == 1 else _row
        return self._passes(loop, int(mask.shape[0]), frame, found, made)

    def _has_value(self, x: Tensor) -> bool:
        return known(x) or self.value(x) is not None

    def _passes(
        self, loop: Loop, count: int, frame: Any, found: Found, made: Callable[[int], Any]
    ) -> Iterator[Any]:
        for i in rows_to_try(found.loop, found.stored, frame.f_locals, count, self._has_value):
            loop.starts.append(self.now())
            self.running.append((frame, found.loop))
            yield made(i)
            self.running.pop()
        loop.stop = self.now()


def _row(number: int) -> Tensor:
    return torch.tensor([number])
