"""Methods that read attributes of their module where it keeps them, past properties of its class.

A property may show code that runs in no call of a module other numbers than those that its own code
computes with. Its forward runs in calls alone, and for each token: it need not ask.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from types import FunctionType
from typing import Any

from shardwright.runtime.code.call_sites import compiled_anew


def past_properties(method: FunctionType, names: Collection[str]) -> FunctionType | None:
    """`method` that finds the attributes `names` of its module in `__dict__`; None if it cannot.

    Functions within it are left alone: they may run when the method is done.
    """

    def change(tree: ast.FunctionDef, owner: str) -> bool:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == owner and type(node.ctx) is not ast.Load:
                return False  # it is another object from then on
        reads = _Reads(owner, names)
        tree.body = [reads.visit(statement) for statement in tree.body]
        return True

    return compiled_anew(method, change)


class _Reads(ast.NodeTransformer):
    """Has `self.name` be `self.__dict__["name"]` where it is read."""

    def __init__(self, owner: str, names: Collection[str]) -> None:
        self.owner, self.names = owner, names

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """Change one read."""
        self.generic_visit(node)
        of_owner = isinstance(node.value, ast.Name) and node.value.id == self.owner
        if not (of_owner and node.attr in self.names and type(node.ctx) is ast.Load):
            return node
        table = ast.copy_location(ast.Attribute(node.value, "__dict__", ast.Load()), node)
        name = ast.copy_location(ast.Constant(node.attr), node)
        return ast.copy_location(ast.Subscript(table, name, ast.Load()), node)

    def _leave(self, node: Any) -> Any:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _leave
    visit_Lambda = visit_GeneratorExp = _leave
