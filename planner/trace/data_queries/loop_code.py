"""Loops of model code whose passes hand nothing to each other but tensors changed in place.

Which passes of `for row in mask.nonzero():` are made, only data says. Where no pass depends on
which others are made, each can be traced as if all were. That is read off the code: within a pass
every name is assigned before it is read, none of them is read after the loop, no attribute is set
and no list or dict is changed.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

PASSED_ON = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SELECTING = ("nonzero", "argwhere", "where", "squeeze", "flatten")
"""Functions that give rows, or the same seen otherwise."""

LOOPS = (ast.For, ast.AsyncFor, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Refused(Exception):
    """A pass of a loop may depend on another; the message says by what."""


class Found(NamedTuple):
    """A loop, and the names that are assigned in it."""

    loop: ast.For
    stored: frozenset[str]


def independent(file: str, line: int, tensors: Collection[str]) -> Found:
    """The loop whose passes are independent that begins on a line of a file.

    Args:
        file: The source.
        line: Where what is looped over is asked for its rows.
        tensors: Names that stand for tensors before the loop.

    Raises:
        Refused: there is no such loop, or they are not independent.
    """
    found = [
        (function, loop)
        for function in ast.walk(parsed(file))
        if isinstance(function, ast.FunctionDef)
        for loop in own(function.body)
        if isinstance(loop, ast.For)
        and loop.iter.lineno <= line <= (loop.iter.end_lineno or loop.iter.lineno)
    ]
    if len(found) != 1:
        raise Refused("the rows that data selects are not taken by one loop")
    ((function, loop),) = found
    below = loop.body[0].lineno > (loop.iter.end_lineno or 0)  # no other loop on that line
    if not (_is_rows(loop.iter) and below and not loop.orelse):
        raise Refused("a loop does more than to take the rows that data selects")
    return Found(loop, passes(function, loop, tensors))


def passes(
    function: ast.FunctionDef,
    code: ast.For | ast.If,
    tensors: Collection[str],
    handed: Collection[str] = (),
) -> frozenset[str]:
    """The names that a loop, or what a test goes around, assigns: for itself alone.

    But for those that are `handed` on, from pass to pass and to code after them.

    Raises:
        Refused: passes are not independent, or code after them reads another of the names.
    """
    target = [code.target] if isinstance(code, ast.For) else []
    nodes = [*target, *code.body]
    stored = frozenset(assigned(nodes))
    changed = {
        node.target.id
        for node in ast.walk(code)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    } & set(tensors)
    only_changed = changed - assigned(nodes, augmented=False)
    passed = _Pass(stored - only_changed - {*handed}, only_changed, tensors)
    passed.block(code.body, passed.target(target[0], set()) if target else set())
    _not_read_after(function, code, passed.stored)
    return stored


def _is_rows(node: ast.expr) -> bool:
    """Whether an expression is a tensor of rows itself, or its list, not something made with it."""
    match node:
        case ast.Call(func=ast.Attribute(value=rows, attr="tolist"), args=[]):
            return _is_rows(rows)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in SELECTING
    return isinstance(node, (ast.Name, ast.Attribute))


def ends_pass(loop: ast.For, line: int) -> ast.expr | None:
    """The test on a line that a pass of `loop` ends at, or else goes on from, if there is one.

    It is that of `if …: continue`, without an `else`, where no other loop is between.
    """
    for test in own(loop.body, LOOPS):
        if (
            isinstance(test, ast.If)
            and test.test.lineno <= line <= (test.test.end_lineno or test.test.lineno)
            and len(test.body) == 1
            and isinstance(test.body[0], ast.Continue)
            and not test.orelse
        ):
            return test.test
    return None


@lru_cache(maxsize=64)
def parsed(file: str) -> ast.Module:
    """The code of a file; nothing where it has none."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def own(
    body: Iterable[ast.AST], without: tuple[type[ast.AST], ...] = PASSED_ON
) -> Iterator[ast.AST]:
    """All nodes of some statements but for those within others of some kinds."""
    for node in body:
        if not isinstance(node, without):
            yield node
            yield from own(ast.iter_child_nodes(node), without)


def assigned(nodes: Iterable[ast.AST], augmented: bool = True) -> set[str]:
    """Names that are assigned; where not `augmented`, by more than `+=` and its like."""
    out = set[str]()
    for node in nodes:
        if isinstance(node, ast.AugAssign) and not augmented:
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            out.add(node.id)
        if not isinstance(node, COMPREHENSIONS):
            out |= assigned(ast.iter_child_nodes(node), augmented)
    return out


def _not_read_after(
    function: ast.FunctionDef, loop: ast.For | ast.If, names: Collection[str]
) -> None:
    """Refuse where code that may run after the loop reads one of `names`."""
    around = [
        node
        for node in ast.walk(function)
        if isinstance(node, LOOPS) and node is not loop and any(n is loop for n in ast.walk(node))
    ]
    within = {id(node) for node in ast.walk(loop)}
    for node in ast.walk(function):
        if not (isinstance(node, ast.Name) and node.id in names) or id(node) in within:
            continue
        if isinstance(node.ctx, ast.Load) and (around or node.lineno > loop.lineno):
            raise Refused(f"'{node.id}' of the last pass is read after the loop")


class _Pass:
    """Goes through a pass in order; `have` are the names that are assigned by then."""

    def __init__(
        self, stored: Collection[str], changed: Collection[str], tensors: Collection[str]
    ) -> None:
        self.stored, self.changed, self.tensors = stored, changed, tensors

    def block(self, body: Iterable[ast.stmt], have: set[str]) -> set[str] | None:
        """The names that are assigned after `body`; None where nothing goes on from there."""
        now: set[str] | None = set(have)
        for statement in body:
            if now is None:
                break
            now = self.statement(statement, now)
        return now

    def statement(self, node: ast.stmt, have: set[str]) -> set[str] | None:
        """The same after one statement."""
        match node:
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                return self.assignment(node, have)
            case ast.Expr():
                self.read(node.value, have)
                if not _in_place(node.value):
                    raise Refused("a pass calls what may keep something for the next")
            case ast.If():
                self.read(node.test, have)
                ends = [self.block(body, have) for body in (node.body, node.orelse)]
                known = [names for names in ends if names is not None]
                return set.intersection(*known) if known else None
            case ast.For():
                self.read(node.iter, have)
                self.block(node.body, self.target(node.target, have))
                self.block(node.orelse, have)
            case ast.With():
                for item in node.items:
                    self.read(item.context_expr, have)
                    have = self.target(item.optional_vars, have) if item.optional_vars else have
                return self.block(node.body, have)
            case ast.Assert():
                self.read(node.test, have)
            case ast.Raise() | ast.Continue():
                return None
            case ast.Pass():
                pass
            case _:
                raise Refused(f"there is a '{type(node).__name__.lower()}' in the loop")
        return have

    def assignment(
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, have: set[str]
    ) -> set[str]:
        """The same after an assignment."""
        if node.value is not None:
            self.read(node.value, have)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self.known(node.target.id, have)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            have = self.target(target, have)
        return have

    def target(self, node: ast.expr, have: set[str]) -> set[str]:
        """The same after `node` is assigned to: a name, several, or elements of a tensor."""
        match node:
            case ast.Name():
                return have | {node.id}
            case ast.Tuple() | ast.List():
                for part in node.elts:
                    have = self.target(part, have)
                return have
            case ast.Subscript(value=ast.Name(id=name)) if name in {*self.tensors, *self.stored}:
                self.read(node, have)
                return have
        raise Refused(f"a pass changes '{ast.unparse(node)}'")

    def read(self, node: ast.expr, have: set[str]) -> None:
        """Refuse an expression that reads a name before it is assigned."""
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)):
            raise Refused(f"'{ast.unparse(node)}' is in the loop")
        if isinstance(node, COMPREHENSIONS):
            have = have | {n for g in node.generators for n in assigned([g.target])}
        if isinstance(node, ast.Name):
            self.known(node.id, have)
        for child in ast.iter_child_nodes(node):
            for part in [child] if isinstance(child, ast.expr) else ast.walk(child):
                if isinstance(part, ast.expr):
                    self.read(part, have)

    def known(self, name: str, have: set[str]) -> None:
        """Refuse a name that still has what another pass gave it."""
        if name in self.stored and name not in have:
            raise Refused(f"a pass reads '{name}' of another")


def _in_place(node: ast.expr) -> bool:
    """A text, or a call of a method that changes a tensor."""
    if isinstance(node, ast.Constant):
        return True
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    name = node.func.attr
    return name.endswith("_") and not name.startswith("_")
