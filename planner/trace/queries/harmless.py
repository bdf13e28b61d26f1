"""Check whether an expression of model code has the same value with either answer to a query.

Most code queries the training mode only for dropout, or with a dropout probability of 0: the answer
then does not matter.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.planner.trace.data_queries.model_code import parsed
from shardwright.planner.trace.sizes.expressions import reads_of

DROPPING = (
    torch.dropout,
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
)
"""Dropout functions; they are traced as if they dropped nothing."""

PLAIN_TYPES = (type(None), bool, int, float)
ORDERS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Is: operator.is_,
        ast.IsNot: operator.is_not,
    },
}

Place = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first and last column of an expression."""


class Unclear(Exception):
    """An expression contains more than names and numbers."""


def harmless(frame: Any) -> bool:
    """Return whether the value of the expression in `frame` is independent of its query's answer.

    The query is an attribute, a call, or a comparison.
    """
    return harmless_at(frame.f_code, frame.f_lasti, {**frame.f_globals, **frame.f_locals})


def harmless_at(
    code: CodeType, at: int, names: Mapping[str, Any], kind: type[ast.AST] = ast.AST
) -> bool:
    """Do the same for a byte offset of `code`, whose names have these values.

    An expression of another `kind` there, such as `min(n, 16)`, does not have the answer as value.
    """
    place = next(islice(code.co_positions(), at // 2, None))
    around = _around(code.co_filename, place)
    if not around or not isinstance(around[0], kind):
        return False
    asked, *outer = around
    for node in outer:
        try:
            if isinstance(node, ast.Call):
                return node is outer[0] and _value(node.func, names, {}) in DROPPING
            ends = [_value(node, names, {asked: truth}) for truth in (False, True)]
        except Exception:  # `Unclear`, or any exception of a comparison
            return False
        if type(ends[0]) in PLAIN_TYPES and type(ends[0]) is type(ends[1]) and ends[0] == ends[1]:
            return True
    return False


@lru_cache(maxsize=1024)
def _around(file: str, place: Place) -> tuple[Any, ...]:
    """Return the expression at a place of a file, and those around it, innermost first."""
    parents: dict[ast.AST, ast.AST] = {}
    for outer in ast.walk(parsed(file)):
        for inner in ast.iter_child_nodes(outer):
            parents[inner] = outer
            if isinstance(inner, (ast.Attribute, ast.Call, ast.Compare)) and _place(inner) == place:
                found: list[ast.expr] = [inner]
                at = parents.get(inner)
                while isinstance(at, (ast.expr, ast.keyword)):
                    found += [at] if isinstance(at, ast.expr) else []
                    at = parents.get(at)
                return tuple(found)
    return ()


def _place(node: ast.expr) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _value(node: Any, names: Mapping[str, Any], given: Mapping[ast.AST, bool]) -> Any:
    """Evaluate an expression of names, attributes and numbers; `given` has values of some nodes.

    Raises:
        Unclear: the expression contains something else.
    """
    if node in given:
        return given[node]

    def value(part: ast.expr) -> Any:
        return _value(part, names, given)

    def plain(part: ast.expr) -> Any:
        return _plain(value(part))

    match node:
        case ast.Constant():
            return node.value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Attribute(value=owner, attr=name) if name != "training":
            return getattr(_no_tensor(value(owner)), name)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not plain(operand)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return value(body if plain(test) else orelse)
        case ast.BoolOp(op=op, values=[*parts, last]):
            stops = isinstance(op, ast.Or)
            found = next((v for v in map(plain, parts) if bool(v) is stops), Unclear)
            return plain(last) if found is Unclear else found
        case ast.Compare(left=left, ops=[ast.Is()], comparators=[right]):
            return value(left) is value(right)
        case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[right]):
            return value(left) is not value(right)
        case ast.Compare(left=left, ops=[order], comparators=[right]) if type(order) in ORDERS:
            return ORDERS[type(order)](plain(left), plain(right))
    raise Unclear


def _plain(value: Any) -> Any:
    if value is not None and not isinstance(value, (int, float)):
        raise Unclear
    if reads_of(getattr(value, "history", ("constant", 0))):  # another length in other calls
        raise Unclear
    return value


def _no_tensor(value: Any) -> Any:
    if isinstance(value, Tensor):  # reading an attribute would count as a query of the model
        raise Unclear
    return value


@lru_cache(maxsize=1024)
def given_back(file: str, line: int) -> bool:
    """Return whether `requires_grad` read on a line is only passed to `x.requires_grad_(...)`."""
    functions = [f for f in ast.walk(parsed(file)) if isinstance(f, ast.FunctionDef)]
    around = [f for f in functions if f.lineno <= line <= (f.end_lineno or 0)]
    if not around:
        return False
    nodes = list(ast.walk(max(around, key=lambda f: f.lineno)))
    again: set[int] = set()
    asked = [n for n in nodes if isinstance(n, ast.Assign) and n.lineno == line]
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="requires_grad_"), args=[ast.Name() as name]):
                again.add(id(name))
    match asked:
        case [ast.Assign([ast.Name(id=of) as name], ast.Attribute(attr="requires_grad"))]:
            uses = (n for n in nodes if isinstance(n, ast.Name) and n.id == of)
            return all(n is name or id(n) in again for n in uses)
    return False
