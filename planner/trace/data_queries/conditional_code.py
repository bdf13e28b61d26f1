"""Find conditional code: passes of loops over selected rows, and code that a test on data skips.

Conditional code is traced as if it always ran. That is correct if it passes nothing but tensors to
other code: it calls nothing that may keep other values, and any other name that it assigns is
assigned before it is read, and is not read outside. `conditional_regions.py` checks what the code
does to tensors.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from shardwright.planner.trace.data_queries.model_code import answer_for, is_at, own, parsed

SELECTING = ("nonzero", "argwhere", "where", "squeeze", "flatten")
"""Functions that return row indices, or views of them."""

LOOPS = (ast.For, ast.AsyncFor, ast.While)
ENDS = (ast.Return, ast.Break, ast.Continue, ast.Raise)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
STATEMENTS = (
    ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.If, ast.For, ast.With, ast.Assert,
    ast.Raise, ast.Continue, ast.Pass,
)  # fmt: skip
"""Statements that conditional code may contain: all of them end within it."""
LATER = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)
"""Expressions that assign, or run later."""

LENGTH = re.compile(r"\blen\([^()]*\)")
PLAIN_TEST = re.compile(r"(not )*\d+( (==|!=|<|<=|>|>=) \d+)?")


class Refused(Exception):
    """Other code may depend on whether the conditional code ran; the message says how."""


class ConditionalCode(NamedTuple):
    """Lines of a function that may not run, and the tensor names that they assign for other code.

    If a `test` decides, the lines run if it gives `answer`. The test may stand before the lines and
    set a flag that is tested later.
    """

    first: int
    last: int
    rebound: frozenset[str]
    test: ast.expr | None = None
    answer: bool = True


def loop_over_rows(file: str, line: int, tensors: Collection[str]) -> ConditionalCode:
    """Return the loop that iterates over the rows queried on a line of a file.

    Args:
        file: The source file.
        line: The line that queries the rows.
        tensors: Names of tensors before the loop.

    Raises:
        Refused: there is no such loop, or its passes pass on more than tensors.
    """
    found = [(f, loop) for f, loop in _loops_and_tests(file)[0] if is_at(loop.iter, line)]
    if len(found) != 1:
        raise Refused("the rows that data selects are not taken by one loop")
    ((function, loop),) = found
    below = loop.body[0].lineno > (loop.iter.end_lineno or 0)  # no other loop on that line
    if not (_is_rows(loop.iter) and below and not loop.orelse):
        raise Refused("a loop does more than to take the rows that data selects")
    return _conditional(function, (loop,), frozenset(tensors))


def _is_rows(node: ast.expr) -> bool:
    """Return whether an expression is a tensor of rows or its `tolist()`, not computed from it."""
    match node:
        case ast.Call(func=ast.Attribute(value=rows, attr="tolist"), args=[]):
            return _is_rows(rows)
        case (
            ast.Call(func=ast.Attribute(attr=name))
            | ast.Subscript(value=ast.Call(func=ast.Attribute(attr=name)))
        ):
            return name in SELECTING
    return isinstance(node, (ast.Name, ast.Attribute))


def skipped_code(
    file: str, line: int, values: Mapping[str, Any], tensors: Collection[str], rows: int | None
) -> ConditionalCode | None:
    """Return the code that the test on a line may skip; None if the test decides more than that.

    Args:
        file: The source file.
        line: The line of the test.
        values: Names and their values at the test.
        tensors: The names of tensors.
        rows: The length that the test compares; the code must run for it. None for another query.
    """
    for function, node in _loops_and_tests(file)[1]:
        if is_at(node.test, line):
            with suppress(Refused):
                return _skipped(function, node, values, tensors, rows)
            return None
    return None


@lru_cache(maxsize=256)
def _loops_and_tests(
    file: str,
) -> tuple[list[tuple[ast.FunctionDef, ast.For]], list[tuple[ast.FunctionDef, ast.If]]]:
    """Return the loops in a file and its `if`s, each with the function that contains it."""
    functions = [n for n in ast.walk(parsed(file)) if isinstance(n, ast.FunctionDef)]
    each = [(function, n) for function in functions for n in own(function.body)]
    loops = [(function, n) for function, n in each if isinstance(n, ast.For)]
    return loops, [(function, n) for function, n in each if isinstance(n, ast.If)]


def _skipped(
    function: ast.FunctionDef,
    node: ast.If,
    values: Mapping[str, Any],
    tensors: Collection[str],
    rows: int | None,
) -> ConditionalCode | None:
    around = [n for n in own(function.body) if isinstance(n, LOOPS) and _in(node, n)]
    asking = _asking_for_flag(function, node, values)
    ends_pass = asking is None and isinstance(node.body[0], ast.Continue)
    test = asking or node
    body = [s for s in around[-1].body if s.lineno > node.lineno] if ends_pass else test.body
    leaves = not ends_pass and any(isinstance(n, ENDS) for n in own(body))
    if leaves or test.orelse or not body or not all(isinstance(n, ast.For) for n in around[-1:]):
        return None
    if not ends_pass and body[0].lineno <= (test.test.end_lineno or 0):
        return None  # code on the line of its test cannot be distinguished from the test
    runs = asking is None and not ends_pass
    if rows is None:
        answer = answer_for(_open_part(node.test, values), runs)
    else:
        answer = runs if _with_length(node.test, rows) is runs else None
    if answer is None:
        return None
    code = _conditional(function, tuple(body), frozenset(tensors))
    return code._replace(test=node.test, answer=answer)


def _asking_for_flag(
    function: ast.FunctionDef, node: ast.If, values: Mapping[str, Any]
) -> ast.If | None:
    """Return the only test of a flag that `node` sets to skip the code of that test, or None."""
    match node:
        case ast.If(
            body=[ast.Assign(targets=[ast.Name(id=flag)], value=ast.Constant(bool(value)))],
            orelse=[],
        ):
            tests = [n for n in own(function.body) if isinstance(n, ast.If)]
            flags = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == flag]
            alone = len(_loads(flags)) == 1 and values.get(flag) is not value
            for test in tests if alone else ():
                asks = ast.unparse(test.test) in (flag, f"not {flag}")
                if asks and test.lineno > node.lineno and answer_for(test.test, True) is not value:
                    return test
    return None


def _open_part(test: ast.expr, values: Mapping[str, Any]) -> ast.expr:
    """Return the undecided part of a test: `a or b` is `a` if `b` is known to be false."""
    if not isinstance(test, ast.BoolOp):
        return test
    neutral = isinstance(test.op, ast.And)
    rest = [v for v in test.values if _value(v, values) is not neutral]
    return rest[0] if len(rest) == 1 else test


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Return the value of a name, or of an attribute of one (`self.training`); None for others."""
    match node:
        case ast.Name(id=name):
            return values.get(name)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return getattr(values.get(name), "__dict__", {}).get(attribute)
    return None


def _with_length(test: ast.expr, rows: int) -> bool | None:
    """Return the truth of a test on `len(...)` or its comparison with a number; None otherwise."""
    text = LENGTH.sub(str(rows), ast.unparse(test))
    return bool(eval(text)) if PLAIN_TEST.fullmatch(text) else None


def _in(node: ast.AST, other: ast.AST) -> bool:
    return any(part is node for part in ast.walk(other))


@lru_cache(maxsize=256)
def _conditional(
    function: ast.FunctionDef, body: tuple[ast.stmt, ...], tensors: frozenset[str]
) -> ConditionalCode:
    """Return conditional statements of a function, with the tensor names that they pass on.

    Raises:
        Refused: the statements may pass on something else.
    """
    assigned = _assigned(body)
    assigned -= {*tensors} - _assigned(body, augmented=False)  # `x += y` changes a tensor in place
    inside = [n for statement in body for n in ast.walk(statement)]
    for node in inside:
        _check(node, {*tensors, *assigned})
    skipped = {id(n) for n in inside}
    outside = [n for n in ast.walk(function) if id(n) not in skipped]
    again = any(isinstance(n, LOOPS) and _in(body[0], n) for n in outside)
    later = (n for n in outside if again or getattr(n, "lineno", 0) > body[0].lineno)
    handed_on = assigned & (_read(later) | _read_first(body, frozenset())[0])
    if other := sorted(handed_on - {*tensors}):
        raise Refused(f"'{other[0]}' is read where code that may not run assigns it")
    return ConditionalCode(body[0].lineno, body[-1].end_lineno or 0, frozenset(handed_on))


def _check(node: ast.AST, tensors: Collection[str]) -> None:
    """Refuse a node that may keep a value outside of `tensors`, or that leaves the code early."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name.endswith(
            "_"
        ) and not name.startswith("_"):  # a method that changes a tensor in place
            return
        case ast.Expr():
            raise Refused("a pass calls what may keep something for the next")
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()) if name in tensors:
            return
        case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()) | ast.Starred():
            raise Refused(f"a pass changes '{ast.unparse(node)}'")
    if isinstance(node, LATER) or (isinstance(node, ast.stmt) and not isinstance(node, STATEMENTS)):
        raise Refused(f"there is a '{type(node).__name__.lower()}' in the loop")


def _assigned(nodes: Iterable[ast.AST], augmented: bool = True) -> set[str]:
    """Return the names that are assigned; without `augmented`, `+=` and the like do not count."""
    out = set[str]()
    for node in nodes:
        if isinstance(node, ast.AugAssign) and not augmented:
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            out.add(node.id)
        if not isinstance(node, COMPREHENSIONS):
            out |= _assigned(ast.iter_child_nodes(node), augmented)
    return out


def _loads(nodes: Iterable[ast.AST]) -> list[ast.Name]:
    return [n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]


def _read(nodes: Iterable[ast.AST]) -> set[str]:
    return {n.id for n in _loads(nodes)}


def _read_first(
    body: Iterable[ast.stmt], have: frozenset[str]
) -> tuple[set[str], frozenset[str] | None]:
    """Return the names that statements read before assigning them, and all names assigned by then.

    `have` are the names assigned before. The second result is None if control never leaves the
    statements at their end.
    """
    stale = set[str]()
    for node in body:
        match node:
            case ast.Raise() | ast.Continue():
                return stale, None
            case ast.If(test=test):
                stale |= _read(ast.walk(test)) - have
                ends = [_read_first(branch, have) for branch in (node.body, node.orelse)]
                stale |= ends[0][0] | ends[1][0]
                known = [names for _, names in ends if names is not None]
                if not known:
                    return stale, None
                have = frozenset.intersection(*known)
            case ast.For():
                stale |= _read(ast.walk(node.iter)) - have
                stale |= _read_first(node.body, have | _assigned([node.target]))[0]
                stale |= _read_first(node.orelse, have)[0]
            case ast.With():
                stale |= _read(n for item in node.items for n in ast.walk(item)) - have
                inner, known_after = _read_first(node.body, have | _assigned(node.items))
                stale |= inner
                if known_after is None:
                    return stale, None
                have = known_after
            case _:
                stale |= _read(ast.walk(node)) - have
                if isinstance(node, ast.AugAssign):
                    stale |= _assigned([node.target]) - have
                have |= _assigned([node])
    return stale, have
