"""What code goes around if data says so: `if not len(rows): continue`, `if mask.any(): …`.

It is traced as if the code never did: as a pass of a loop that may be made or not (`loops.py`).
That is as right as both ways where nothing else depends on which was taken: names that are assigned
there are read nowhere else, or stand for a tensor like the one that they stood for before; and of
these, as of tensors changed in place there, the state before and after is the same. Where code asks
few such questions it is rather run both ways (`branch_paths.py`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.planner.trace.data_queries.loop_code import (
    LOOPS,
    Refused,
    assigned,
    own,
    parsed,
    passes,
)
from shardwright.planner.trace.data_queries.loops import Loop, inner
from shardwright.planner.trace.data_queries.model_code import truth

ENDS = (ast.Return, ast.Break, ast.Continue, ast.Raise)


class Skip(NamedTuple):
    """A test, the answer with which code does not skip, and the lines that it would skip.

    In these the names `handed` are assigned anew, and code outside of them may read one. Where the
    test is `ahead` of them it sets a flag, that another asks for right before them.
    """

    test: ast.expr
    answer: bool
    first: int
    last: int
    handed: frozenset[str]
    ahead: bool = False


@dataclass
class Open:
    """What may be skipped and runs now."""

    frame: Any
    skip: Skip
    loop: Loop
    before: dict[str, Tensor]
    """What the names stood for that it hands on."""
    waits: bool
    """Whether code did not get to it yet."""


class Skips:
    """What may be skipped of the code that runs; `now` is how many calls were made so far."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self.open: list[Open] = []
        self.closed: list[Loop] = []

    def goes_on(self, frame: Any, rows: int | None = None) -> bool | None:
        """The answer to the test that `frame` is at, with which it goes on into what it may skip.

        With `rows`, that must be the answer where these are the length that it asks for. None where
        the code does more than to skip.
        """
        names = frame.f_locals
        tensors = frozenset(n for n, v in names.items() if isinstance(v, Tensor))
        known = frozenset((n, v) for n, v in names.items() if v is True or v is False)
        skip = find(frame.f_code.co_filename, frame.f_lineno, tensors, known, rows is not None)
        if skip is None or (rows is not None and with_length(skip.test, rows) != skip.answer):
            return None
        self.settle()
        before = {name: inner(names[name]) for name in skip.handed}
        alike = rows is None and bool(before)  # a length may be that of what a rank selects
        loop = Loop(None, [self.now()], alike=alike)
        self.open.append(Open(frame, skip, loop, before, skip.ahead))
        return skip.answer if rows is None else True

    def settle(self) -> None:
        """Close what no longer runs."""
        if self.open:
            running = _frames()
            for one in list(self.open):
                line = one.frame.f_lineno if one.frame in running else 0
                within = one.skip.first <= line <= one.skip.last
                one.waits &= not within and one.skip.test.lineno <= line < one.skip.first
                if not (within or one.waits):
                    self._close(one)

    def ended(self) -> list[Loop]:
        """All that might have been skipped, when nothing runs any more."""
        for one in list(self.open):
            self._close(one)
        return self.closed

    def _close(self, one: Open) -> None:
        one.loop.stop = self.now()
        after = ((before, one.frame.f_locals.get(name)) for name, before in one.before.items())
        one.loop.handed = [(before, inner(now)) for before, now in after if now is not None]
        self.closed.append(one.loop)
        self.open.remove(one)


def _frames() -> list[Any]:
    frame: Any = sys._getframe(1)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


@lru_cache(maxsize=256)
def find(
    file: str,
    line: int,
    tensors: Collection[str],
    known: Collection[tuple[str, bool]],
    of_lengths: bool,
) -> Skip | None:
    """What the test on a line of a file may skip; None where more depends on it.

    `tensors` are names that stand for tensors, `known` those that stand for truths. Tests
    `of_lengths` need not be one question.
    """
    functions = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for node in own(function.body):
            if isinstance(node, ast.If) and node.test.lineno <= line <= (node.test.end_lineno or 0):
                try:
                    return _skip(function, node, tensors, dict(known), of_lengths)
                except Refused:
                    return None
    return None


def _skip(
    function: ast.FunctionDef,
    node: ast.If,
    tensors: Collection[str],
    known: Mapping[str, bool],
    of_lengths: bool,
) -> Skip | None:
    if (skip := _by_flag(function, node, tensors, known)) is not None:
        return skip
    around = [loop for loop in own(function.body) if isinstance(loop, LOOPS) and _in(node, loop)]
    loop = around[-1] if around else None
    ends_pass = len(node.body) == 1 and isinstance(node.body[0], ast.Continue)
    below = node.body[0].lineno > (node.test.end_lineno or node.test.lineno)
    if node.orelse or not isinstance(loop, (ast.For, type(None))):
        return None
    if ends_pass:
        assert loop is not None
        first, last = (node.end_lineno or 0) + 1, loop.body[-1].end_lineno or 0
    else:
        first, last = node.body[0].lineno, node.body[-1].end_lineno or 0
    leaves = any(isinstance(n, ENDS) for n in own(node.body))
    if not ends_pass and (leaves or not below):  # on one line it cannot be told from its test
        return None
    answer = not ends_pass
    if not of_lengths:
        if (found := truth(_asked(node.test, known), answer)) is None:
            return None
        answer = found
    return Skip(node.test, answer, first, last, _handed(function, node, loop, ends_pass, tensors))


def _by_flag(
    function: ast.FunctionDef, node: ast.If, tensors: Collection[str], known: Mapping[str, bool]
) -> Skip | None:
    """What `node` has other code go around by a flag that it sets; None where it does otherwise.

    The flag is asked for once, by that code's own test.

    Raises:
        Refused: that code hands on more than tensors.
    """
    match node:
        case ast.If(
            body=[ast.Assign(targets=[ast.Name(id=flag)], value=ast.Constant(bool(value)))]
        ):
            answer = truth(node.test, False)
        case _:
            return None
    reads = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == flag]
    reads = [name for name in reads if isinstance(name.ctx, ast.Load)]
    tests = [n for n in own(function.body) if isinstance(n, ast.If) and n.lineno > node.lineno]
    asking = [n for n in tests if reads and _in(reads[0], n.test)]
    if node.orelse or answer is None or len(reads) != 1 or len(asking) != 1:
        return None
    (rest,) = asking
    wanted, test = True, rest.test
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        wanted, test = not wanted, test.operand
    ends = any(isinstance(n, ENDS) for n in own(rest.body))
    if test is not reads[0] or rest.orelse or ends or not known.get(flag) is wanted is not value:
        return None
    first, last = rest.body[0].lineno, rest.body[-1].end_lineno or 0
    handed = _handed(function, rest, None, False, tensors)
    return Skip(node.test, answer, first, last, handed, ahead=True)


def _asked(test: ast.expr, known: Mapping[str, bool]) -> ast.expr:
    """What of a test is open: `a or b` is `a` where `b` is known to be false."""
    if not isinstance(test, ast.BoolOp):
        return test
    neutral = isinstance(test.op, ast.And)
    rest = [v for v in test.values if not (isinstance(v, ast.Name) and known.get(v.id) is neutral)]
    return rest[0] if len(rest) == 1 else test


def _handed(
    function: ast.FunctionDef,
    node: ast.If,
    loop: ast.For | None,
    ends_pass: bool,
    tensors: Collection[str],
) -> frozenset[str]:
    """The names of tensors that what `node` goes around hands on to code outside of it.

    Raises:
        Refused: it hands on more.
    """
    with suppress(Refused):
        passes(function, loop or node, tensors)
        return frozenset()
    rest = [n for n in loop.body if n.lineno > node.lineno] if loop and ends_pass else node.body
    handed = frozenset(assigned(rest)) & {*tensors}
    passes(function, loop if loop and ends_pass else node, tensors, handed)
    return handed


def _in(node: ast.AST, loop: ast.AST) -> bool:
    return any(part is node for part in ast.walk(loop))


def with_length(test: ast.expr, rows: int) -> bool | None:
    """The truth of a test that asks for a length and compares it; None of any other."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            found = with_length(operand, rows)
            return None if found is None else not found
        case ast.Call(func=ast.Name(id="len")):
            return bool(rows)
        case ast.Compare(left=ast.Call(func=ast.Name(id="len")), ops=[op], comparators=[right]):
            if not isinstance(right, ast.Constant) or not isinstance(right.value, int):
                return None
            order = ORDERS.get(type(op))
            return None if order is None else order(rows, right.value)
    return None


ORDERS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
}
