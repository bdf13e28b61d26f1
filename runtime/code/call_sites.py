"""Calls in the source of a method: names them for plans, and recompiles them with local sizes.

Code such as `y.view(B, T, C)`, with `C` read off a full tensor, passes a size that no attribute can
change. A plan names the call: `forward.view.3` is the fourth call of a `view` in the source of
`forward`. The method of the split module is recompiled from its source, with a call for local sizes
there. The rest of the method is unchanged.
"""

from __future__ import annotations

import ast
import copy
import inspect
import threading
from collections.abc import Collection, Iterator
from functools import lru_cache
from itertools import islice
from types import CodeType, FunctionType

from shardwright.runtime.code.source import source_of
from shardwright.runtime.subclasses import copy_of

LOCAL_SIZES = "_shardwright_sizes"
"""The method of a split module that returns local sizes, given the name and arguments of a call."""


_ALONE = threading.RLock()
"""Guards parsing and compiling: Python 3.11 has one recursion counter for all threads."""


def method_of(kind: type, name: str) -> FunctionType | None:
    """The method `name` of class `kind` if it is a plain function, or None."""
    found = inspect.getattr_static(kind, name, None)
    return found if isinstance(found, FunctionType) else None


@lru_cache(maxsize=64)
def name_of(method: FunctionType, code: CodeType, at: int) -> str | None:
    """The name of a call in `method`; None if the source is missing or differs from what runs.

    Args:
        method: The method.
        code: Its code object, or that of a function within it.
        at: The byte offset of the call in that code.
    """
    _, last, _, column = next(islice(code.co_positions(), at // 2, None))
    with _ALONE:
        source = source_of(method)
    for name, call in _named(source.definition) if source is not None else ():
        if (call.end_lineno, call.end_col_offset) == (last, column):
            return name
    return None


def with_local_sizes(method: FunctionType, calls: Collection[str]) -> FunctionType | None:
    """Recompile `method` with local sizes in `calls`; None if its source lacks one of them."""
    with _ALONE:
        code = _with_local_sizes(method, calls)
    if code is None or code.co_freevars != method.__code__.co_freevars:
        return None
    return copy_of(method, code)


def _with_local_sizes(method: FunctionType, calls: Collection[str]) -> CodeType | None:
    """Compile `method` with local sizes in `calls`; the cached source tree is restored."""
    source = source_of(method)
    if source is None:
        return None
    tree = source.definition
    takes = [*tree.args.posonlyargs, *tree.args.args]
    kept, tree.body = tree.body, copy.deepcopy(tree.body)  # copying the whole tree is slow
    try:
        named = dict(_named(tree))
        if not takes or not named.keys() >= set(calls):
            return None
        for name in calls:
            call, owner = named[name], ast.Name(takes[0].arg, ast.Load())
            method_of_owner = ast.Attribute(owner, LOCAL_SIZES, ast.Load())
            sizes = ast.Call(method_of_owner, [ast.Constant(name), *call.args], [])
            call.args = [ast.copy_location(ast.Starred(sizes, ast.Load()), call)]
        ast.fix_missing_locations(tree)
        return source.code(method)
    finally:
        tree.body = kept


def _named(tree: ast.FunctionDef) -> Iterator[tuple[str, ast.Call]]:
    """The calls in a method with their names, ordered by where they end."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    count: dict[str, int] = {}
    for call in sorted(calls, key=lambda c: (c.end_lineno or 0, c.end_col_offset or 0)):
        word = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
        number = count[word] = count.get(word, -1) + 1
        yield f"{tree.name}.{word}.{number}", call
