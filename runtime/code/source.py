"""Parses the source of a method: the top-level statement of its file with it, usually a class.

A file of a model has dozens of classes, and a tree of all of them takes megabytes. Only the
statement with the method and imports are parsed (Python compiles calls of imported names to other
code). Where statements begin is guessed from the first characters of lines. If a multi-line string
or an `else` makes the guess wrong, the compiled code differs, and the full file is parsed. Source
that does not compile to exactly the code that runs is not used.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FunctionType


@dataclass(frozen=True)
class Source:
    """The parsed source of a method.

    Attributes:
        tree: The parsed statements.
        definition: The definition of the method in the tree.
    """

    tree: ast.Module
    definition: ast.FunctionDef

    def code(self, method: FunctionType) -> CodeType | None:
        """Compile the tree as it is now; returns the code object of `method`, or None."""
        old = method.__code__
        for code in codes_in(compile(self.tree, old.co_filename, "exec", dont_inherit=True)):
            if (code.co_qualname, code.co_firstlineno) == (old.co_qualname, old.co_firstlineno):
                return code
        return None


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of functions and comprehensions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def source_of(method: FunctionType) -> Source | None:
    """The source of `method`; None if none compiles to exactly the code that runs."""
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
    """`lines`, all empty except imports and the top-level statement that contains line `at`."""
    begins = [i for i, line in enumerate(lines) if _begins(line)]
    out = ["\n"] * len(lines)
    for first, last in pairwise([*begins, len(lines)]):
        if first <= at < last or lines[first].startswith(("import ", "from ")):
            out[first:last] = lines[first:last]
    return out


def _begins(line: str) -> bool:
    """Whether a top-level statement seems to begin at this line."""
    return not (line[:1].isspace() or line.startswith(("#", ")", "]", "}")))


@lru_cache(maxsize=16)
def _parsed(file: str, text: str) -> ast.Module | None:
    try:
        return ast.parse(text, file)
    except SyntaxError:
        return None


def _definition(tree: ast.Module | None, method: FunctionType) -> ast.FunctionDef | None:
    """The definition of `method` in a tree, found by name and line."""
    line = method.__code__.co_firstlineno
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.FunctionDef) or node.name != method.__name__:
            continue
        if line == min(n.lineno for n in (node, *node.decorator_list)):
            return node
    return None
