"""Which passes of a loop over rows stand for all: those whose code takes the same way.

Where the number of a row does nothing but select from tensors and be compared with numbers of the
model, passes for rows on the same side of all of these make the same calls.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

ORDERS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
VIEWS = ("view", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "permute", "to")
"""Methods of a tensor that give its own elements."""

SAME_NUMBER = ("item", "squeeze")
"""Methods of a tensor of one number that give no more than that."""


class Otherwise(Exception):
    """The number of a row is used otherwise."""


def rows_to_try(
    loop: ast.For,
    stored: Collection[str],
    values: Mapping[str, Any],
    count: int,
    has_value: Callable[[Tensor], bool] = lambda tensor: False,
) -> Sequence[int]:
    """One number of a row for each way that a pass can take; all where that cannot be told.

    Args:
        loop: The loop.
        stored: Names that are assigned in it.
        values: What names stand for before it.
        count: How many rows there are at most.
        has_value: Whether a tensor has a value though there is no data: code may branch on that.
    """
    try:
        cuts = _Uses(loop, stored, values, has_value).cuts
    except Otherwise:
        return range(count)
    found = {0} | {n for cut in cuts for n in (cut, cut + 1)}
    return sorted(n for n in found if 0 <= n < count)


class _Uses:
    """What a pass does with the number of its row; `cuts` are the numbers it is compared with."""

    def __init__(
        self,
        loop: ast.For,
        stored: Collection[str],
        values: Mapping[str, Any],
        has_value: Callable[[Tensor], bool],
    ) -> None:
        if not isinstance(loop.target, ast.Name):
            raise Otherwise
        self.stored, self.values, self.has_value = stored, values, has_value
        self.cuts = set[int]()
        self.rows = {loop.target.id}
        assigned = [n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Assign)]
        before = 0
        while len(self.rows) > before:
            before = len(self.rows)
            self.rows |= {
                a.targets[0].id
                for a in assigned
                if isinstance(a.targets[0], ast.Name) and self.is_row(a.value)
            }
        for statement in loop.body:
            self.visit(statement)

    def is_row(self, node: ast.AST) -> bool:
        """Whether an expression is the number of the row."""
        match node:
            case ast.Name(id=name):
                return name in self.rows
            case ast.Subscript(value=value, slice=ast.Constant(value=0)):
                return self.is_row(value)
            case ast.Call(func=ast.Name(id="int"), args=[value], keywords=[]):
                return "int" not in self.stored and self.is_row(value)
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]):
                return name in SAME_NUMBER and self.is_row(value)
        return False

    def names_row(self, node: ast.AST) -> bool:
        """Whether the number of the row is read anywhere in a node."""
        return any(isinstance(n, ast.Name) and n.id in self.rows for n in ast.walk(node))

    def visit(self, node: ast.AST) -> None:
        """Take in the uses in a node."""
        match node:
            case ast.Assign(targets=[ast.Name()], value=value) if self.is_row(value):
                return
            case ast.Name(id=name) if name in self.rows:
                raise Otherwise
            case ast.Compare(left=left, ops=[order], comparators=[right]) if self.names_row(node):
                row, other = (left, right) if self.is_row(left) else (right, left)
                cut = self.value(other)
                if not (self.is_row(row) and isinstance(order, ORDERS) and isinstance(cut, int)):
                    raise Otherwise
                self.cuts.add(int(cut))
                return
            case ast.Subscript(value=value, slice=index) if self.names_row(index):
                parts = index.elts if isinstance(index, ast.Tuple) else [index]
                others = [part for part in parts if not self.is_row(part)]
                if not self.is_tensor(value):
                    raise Otherwise
                for part in [value, *others]:
                    self.visit(part)
                return
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def value(self, node: ast.AST) -> Any:
        """What an expression stands for all the time; None if that cannot be told."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name not in self.stored:
                return self.values.get(name)
            case ast.Attribute(value=owner, attr=name):
                found = self.value(owner)
                held = {**found._parameters, **found._buffers} if _is_module(found) else {}
                return held[name] if name in held else getattr(found, name, None)
        return None

    def is_tensor(self, node: ast.AST) -> bool:
        """Whether an expression is a tensor with data, a part of one, or one seen otherwise."""
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                return name in VIEWS and self.is_tensor(value)
            case ast.Subscript(value=value):
                return self.is_tensor(value)
        found = self.value(node)
        return isinstance(found, Tensor) and not self.has_value(found)


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)
