"""Comparisons of lengths in model code, such as `if x.shape[1] > 10`, and of loops (`loops.py`).

A trace follows the branch for its own lengths. A plan therefore says which comparisons came out the
same in all traced calls, and a call for which one comes out otherwise is refused.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from shardwright.planner.contract.names import grouped
from shardwright.planner.trace.data_queries.model_code import (
    answer_that_goes_on,
    is_plumbing,
    module_of,
)
from shardwright.planner.trace.queries.harmless import harmless_at
from shardwright.planner.trace.sizes.expressions import Expression, reads_of

SIGNS = dict(__eq__="==", __ne__="!=", __lt__="<", __le__="<=", __gt__=">", __ge__=">=")
"""Methods of integers that compare -> the operator."""


class LengthTest(NamedTuple):
    """A comparison, and its outcome."""

    where: str
    left: Expression
    sign: str
    right: Expression
    outcome: bool
    module: str
    """The module whose code compares."""


def _place(frame: Any) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _of_other_object(frame: Any) -> bool:
    """Whether a frame runs a method of an object that is no module."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    owner = frame.f_locals.get("self") if names[:1] == ("self",) else None
    return owner is not None and not isinstance(owner, nn.Module)


def _question(test: LengthTest) -> tuple[Any, ...]:
    """Return what is asked: the comparison without the tensors whose lengths are compared."""
    return test.sign, _of_any_tensor(test.left), _of_any_tensor(test.right)


def _of_any_tensor(side: Expression) -> Any:
    if side[0] == "read":
        return side[3]
    return tuple(_of_any_tensor(part) if type(part) is tuple else part for part in side)


class LengthTests:
    """The comparisons of lengths in one trace."""

    def __init__(self) -> None:
        self.found: dict[tuple[CodeType, int], dict[LengthTest, None]] = {}
        self._names: dict[tuple[CodeType, int], Mapping[str, Any]] = {}
        self._loops: dict[LengthTest, tuple[Any, ...]] = {}
        self._more: set[tuple[Any, ...]] = set()

    def note(
        self, sign: str, left: Expression, right: Expression, outcome: bool, module: str
    ) -> None:
        """Note a comparison that model code makes.

        Those in methods of other objects, such as caches, do not count: they may be of what the
        object keeps from earlier calls.
        """
        frame: Any = sys._getframe(2)  # the code that called the method of the integer
        if module_of(frame).startswith(f"{__package__}."):  # its truth is a comparison with 0
            frame = frame.f_back
        if is_plumbing(module_of(frame)) or not (reads_of(left) or reads_of(right)):
            return
        if _of_other_object(frame):
            return
        site = frame.f_code, frame.f_lasti
        if site not in self.found:
            self.found[site] = {}
            self._names[site] = {**frame.f_globals, **frame.f_locals}
        self.found[site][LengthTest(_place(frame), left, sign, right, outcome, module)] = None

    def note_runs(
        self,
        frame: Any,
        span: Expression,
        size: Expression,
        number: int,
        module: str,
        shown: bool = False,
    ) -> None:
        """Note that code in a frame runs as often as `size` fits in `span`, rounded up.

        If it does not run, or once, no call may run it more often; any may run it less often. With
        `shown`, the only run shows what more would do.
        """
        if is_plumbing(module_of(frame)) or _of_other_object(frame) or not reads_of(span):
            return
        for most, bound in enumerate((("constant", 0), size)):
            test = LengthTest(_place(frame), span, "<=", bound, True, module)
            asked = frame.f_code, module, _question(test)
            if number > most:
                self._more.add(asked)
            elif number == most and not shown:
                self._loops[test] = asked

    def deciding(self) -> list[LengthTest]:
        """The comparisons that came out the same wherever they are in the code, if that matters.

        It does not if the code raises otherwise, or if the expression around has the same value.
        """
        out: list[LengthTest] = []
        for (code, at), tests in self.found.items():
            lines = {int(test.where.rpartition(":")[2]) for test in tests}
            raises = any(answer_that_goes_on(code.co_filename, n) is not None for n in lines)
            if raises or harmless_at(code, at, self._names[code, at], ast.Compare):
                continue
            outcomes = grouped((_question(test), test.outcome) for test in tests)
            out += [test for test in tests if len({*outcomes[_question(test)]}) == 1]
        self._names.clear()
        return [*out, *(test for test, asked in self._loops.items() if asked not in self._more)]
