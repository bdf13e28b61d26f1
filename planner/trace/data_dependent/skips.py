"""What code goes around if data says so: `if not len(rows): continue`, `if mask.any(): …`.

It is traced as if the code never did: as a pass of a loop that may be made or not (`loops.py`).
That is as right as both ways where nothing else depends on which was taken: names that are assigned
there are read nowhere else, and of tensors changed in place there, the state before and after is
the same. Where code asks few such questions it is rather run both ways (`branch_paths.py`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.planner.trace.data_dependent.loop_code import LOOPS, Refused, own, parsed, passes
from shardwright.planner.trace.data_dependent.loops import Loop
from shardwright.planner.trace.data_dependent.model_code import truth

ENDS = (ast.Return, ast.Break, ast.Continue, ast.Raise)


class Skip(NamedTuple):
    """A test, the answer with which code does not skip, and the lines that it would skip."""

    test: ast.expr
    answer: bool
    first: int
    last: int


@dataclass
class Open:
    """What may be skipped and runs now."""

    frame: Any
    skip: Skip
    loop: Loop


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
        tensors = frozenset(n for n, v in frame.f_locals.items() if isinstance(v, Tensor))
        skip = find(frame.f_code.co_filename, frame.f_lineno, tensors, rows is not None)
        if skip is None or (rows is not None and with_length(skip.test, rows) != skip.answer):
            return None
        self.settle()
        self.open.append(Open(frame, skip, Loop(None, [self.now()])))
        return skip.answer if rows is None else True

    def settle(self) -> None:
        """Close what no longer runs."""
        if self.open:
            running = _frames()
            for one in list(self.open):
                line = one.frame.f_lineno if one.frame in running else 0
                if not one.skip.first <= line <= one.skip.last:
                    self._close(one)

    def ended(self) -> list[Loop]:
        """All that might have been skipped, when nothing runs any more."""
        for one in list(self.open):
            self._close(one)
        return self.closed

    def _close(self, one: Open) -> None:
        one.loop.stop = self.now()
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
def find(file: str, line: int, tensors: Collection[str], of_lengths: bool) -> Skip | None:
    """What the test on a line of a file may skip; None where more depends on it.

    `tensors` are names that stand for tensors. Tests `of_lengths` need not be one question.
    """
    for function in ast.walk(parsed(file)):
        for node in own(function.body) if isinstance(function, ast.FunctionDef) else ():
            last = getattr(node, "test", node).end_lineno if isinstance(node, ast.If) else 0
            if isinstance(node, ast.If) and node.test.lineno <= line <= (last or 0):
                try:
                    return _skip(function, node, tensors, of_lengths)
                except Refused:
                    return None
    return None


def _skip(
    function: ast.FunctionDef, node: ast.If, tensors: Collection[str], of_lengths: bool
) -> Skip | None:
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
        if (found := truth(node.test, answer)) is None:
            return None
        answer = found
    passes(function, loop or node, tensors)
    return Skip(node.test, answer, first, last)


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
