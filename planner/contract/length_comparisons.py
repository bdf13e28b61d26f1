"""Comparisons of lengths and numbers of dims as a plan writes them: `x.shape[1] > 10`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from functools import lru_cache

from shardwright.errors import PlanError

OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}

COMPARE = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt},
    **{ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
}
COMPUTE = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.FloorDiv: lambda a, b: a // b if b else 0, ast.Mod: lambda a, b: a % b if b else 0},
}


def holds(text: str, sizes: Mapping[str, int]) -> bool:
    """Return whether a comparison holds for these sizes, by their text (`x.shape[1]`).

    Raises:
        KeyError: a size is missing.
        PlanError: this is no comparison of lengths.
    """
    node = parsed(text)
    return COMPARE[type(node.ops[0])](_size(node.left, sizes), _size(node.comparators[0], sizes))


def sizes_in(text: str) -> list[tuple[str, int]]:
    """Return the (argument, dim) pairs whose sizes a comparison names.

    Raises:
        PlanError: this is no comparison of lengths.
    """
    nodes = [n for n in ast.walk(parsed(text)) if isinstance(n, ast.Subscript)]
    return [(n.value.value.id, n.slice.value) for n in nodes]  # type: ignore[attr-defined]


def names_in(text: str) -> list[str]:
    """Return the sizes that a comparison names, as text: `x.shape[1]`, `x.ndim`.

    Raises:
        PlanError: this is no comparison of lengths.
    """
    nodes = ast.walk(parsed(text))
    return sorted({ast.unparse(n) for n in nodes if isinstance(n, ast.Subscript) or _is_ndim(n)})


def numbers_in(text: str) -> set[int]:
    """Return the numbers that a comparison states, besides those of dims."""
    dims = {id(n.slice) for n in ast.walk(parsed(text)) if isinstance(n, ast.Subscript)}
    stated = (n for n in ast.walk(parsed(text)) if isinstance(n, ast.Constant))
    return {int(n.value) for n in stated if id(n) not in dims}  # type: ignore[arg-type]


def is_between_lengths(text: str) -> bool:
    """Return whether lengths are compared with, or subtracted from, each other."""
    node = parsed(text)
    steps = (n for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub))
    pairs = ((node.left, node.comparators[0]), *((n.left, n.right) for n in steps))
    return any(all(map(_has_length, pair)) for pair in pairs)


def _has_length(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Subscript) for n in ast.walk(node))


@lru_cache(maxsize=1024)
def parsed(text: str) -> ast.Compare:
    """Parse a comparison.

    Raises:
        PlanError: this is no comparison of lengths.
    """
    try:
        node = ast.parse(text, mode="eval").body
        assert isinstance(node, ast.Compare)
        assert len(node.ops) == 1
        assert type(node.ops[0]) in COMPARE
        assert _is_size(node.left)
        assert _is_size(node.comparators[0])
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        raise PlanError(f"{text!r:.80} compares no lengths, as x.shape[1] > 10 does") from None
    return node


def _is_size(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=int()) | ast.UnaryOp(ast.USub(), ast.Constant(value=int())):
            return True
        case ast.Subscript(
            value=ast.Attribute(value=ast.Name(), attr="shape"), slice=ast.Constant(value=int())
        ):
            return True
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTE:
            return _is_size(left) and _is_size(right)
    return _is_ndim(node)


def _is_ndim(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(), attr="ndim"):
            return True
    return False


def _size(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=value):
            return int(value)  # type: ignore[arg-type]
        case ast.UnaryOp(operand=operand):
            return -_size(operand, sizes)
        case ast.BinOp(left=left, op=op, right=right):
            return COMPUTE[type(op)](_size(left, sizes), _size(right, sizes))
    return sizes[ast.unparse(node)]
