"""The source of a method, parsed: the statement of its file that has it, which mostly is a class.

A file of a model has dozens, and a tree of all takes megabytes. So what does not matter is left
out, by how lines begin: all but that one and imports (Python calls what was imported by other
code). What a string or an `else` makes of that shows in the code that is compiled, and then the
whole file is parsed. Source that does not compile to just what runs is none.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FunctionType


@dataclass(frozen=True)
class Source:
    """Where a method is defined.

    Attributes:
        tree: What was parsed.
        definition: That of the method in it.
    """

    tree: ast.Module
    definition: ast.FunctionDef

    def code(self, method: FunctionType) -> CodeType | None:
        """What the tree, as it is now, compiles to where it defines `method`."""
        old = method.__code__
        found = [compile(self.tree, old.co_filename, "exec", dont_inherit=True)]
        for code in found:
            if (code.co_qualname, code.co_firstlineno) == (old.co_qualname, old.co_firstlineno):
                return code
            found += [c for c in code.co_consts if isinstance(c, CodeType)]
        return None


def source_of(method: FunctionType) -> Source | None:
    """The source of `method`; None where there is none that compiles to just what runs."""
    file = method.__code__.co_filename
    lines = linecache.getlines(file, method.__globals__)
    for kept in (_around(lines, method.__code__.co_firstlineno - 1), lines):
        tree = _parsed(file, "".join(kept))
        definition = _definition(tree, method)
        if tree is None or definition is None:
            continue
        source = Source(tree, definition)
        if source.code(method) == method.__code__:
            return source
    return None


def _around(lines: Sequence[str], at: int) -> list[str]:
    """`lines`, empty but for imports and the outermost statement that has line `at`."""
    begins = [i for i, line in enumerate(lines) if _begins(line)]
    out = ["\n"] * len(lines)
    for first, last in pairwise([*begins, len(lines)]):
        if first <= at < last or lines[first].startswith(("import ", "from ")):
            out[first:last] = lines[first:last]
    return out


def _begins(line: str) -> bool:
    """Whether a line looks as if a statement of the file itself begins there."""
    return not (line[:1].isspace() or line.startswith(("#", ")", "]", "}")))


@lru_cache(maxsize=16)
def _parsed(file: str, text: str) -> ast.Module | None:
    try:
        return ast.parse(text, file)
    except SyntaxError:
        return None


def _definition(tree: ast.Module | None, method: FunctionType) -> ast.FunctionDef | None:
    """Where a tree defines `method`."""
    line = method.__code__.co_firstlineno
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.FunctionDef) or node.name != method.__name__:
            continue
        if line == min(n.lineno for n in (node, *node.decorator_list)):
            return node
    return None
