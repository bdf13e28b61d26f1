"""Calls in the source of a method: what they are called in plans, and how they get local sizes.

Code such as `y.view(B, T, C)` with `C` read off a whole tensor gives a size that no attribute can
change. A plan names the call, `forward.view.3`: the fourth call of a `view` in the source of
`forward`. The method of the split module is compiled from that source anew, and asks for local
sizes there. All else of it is as it was.
"""

from __future__ import annotations

import ast
import copy
import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from types import CodeType, FunctionType

from shardwright.runtime.code.source import source_of

LOCAL_SIZES = "_shardwright_sizes"
"""The method of a split module that gives local sizes: of the name of a call, and what it takes."""


_ALONE = threading.RLock()
"""Python 3.11 counts how deep it is in a tree once for all threads."""


def method_of(kind: type, name: str) -> FunctionType | None:
    """The plain function that is the method `name` of class `kind`."""
    found = inspect.getattr_static(kind, name, None)
    return found if isinstance(found, FunctionType) else None


def name_of(method: FunctionType, code: CodeType, at: int) -> str | None:
    """The name of a call in `method`; None where there is no source that is just what runs.

    Args:
        method: The method.
        code: Its code, or that of a function within it.
        at: Where the call stands in that code, in bytes.
    """
    _, last, _, column = next(islice(code.co_positions(), at // 2, None))
    with _ALONE:
        source = source_of(method)
    for name, call in _named(source.definition) if source is not None else ():
        if (call.end_lineno, call.end_col_offset) == (last, column):
            return name
    return None


def with_local_sizes(method: FunctionType, calls: Collection[str]) -> FunctionType | None:
    """`method` with local sizes in `calls`; None if its source has no such calls."""

    def ask(tree: ast.FunctionDef, owner: str) -> bool:
        found = dict(_named(tree))
        if not found.keys() >= set(calls):
            return False
        for name in calls:
            call = found[name]
            ask = ast.Attribute(ast.Name(owner, ast.Load()), LOCAL_SIZES, ast.Load())
            asked = ast.Call(ask, [ast.Constant(name), *call.args], [])
            call.args = [ast.Starred(asked, ast.Load())]
            ast.copy_location(call.args[0], call)
        return True

    return compiled_anew(method, ask)


def compiled_anew(
    method: FunctionType, change: Callable[[ast.FunctionDef, str], bool]
) -> FunctionType | None:
    """`method` as its source has it once that is changed; None where that cannot be.

    Args:
        method: The method.
        change: Given its definition, whose body it changes, and what `self` is called there;
            whether it could.
    """
    with _ALONE:
        code = _changed(method, change)
    if code is None or code.co_freevars != method.__code__.co_freevars:
        return None
    made = FunctionType(
        code, method.__globals__, method.__name__, method.__defaults__, method.__closure__
    )
    made.__kwdefaults__, made.__annotations__ = method.__kwdefaults__, method.__annotations__
    made.__qualname__, made.__module__ = method.__qualname__, method.__module__
    made.__doc__ = method.__doc__
    made.__dict__.update(method.__dict__)
    return made


def _changed(
    method: FunctionType, change: Callable[[ast.FunctionDef, str], bool]
) -> CodeType | None:
    """The code of `method` once the body of its definition is changed, in its source as kept."""
    source = source_of(method)
    if source is None:
        return None
    tree = source.definition
    takes = [*tree.args.posonlyargs, *tree.args.args]
    kept, tree.body = tree.body, copy.deepcopy(tree.body)  # of all that is parsed it takes long
    try:
        if not takes or not change(tree, takes[0].arg):
            return None
        ast.fix_missing_locations(tree)
        return source.code(method)
    finally:
        tree.body = kept


def _named(tree: ast.FunctionDef) -> Iterator[tuple[str, ast.Call]]:
    """The calls in a method by name, in the order in which they end."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    count: dict[str, int] = {}
    for call in sorted(calls, key=lambda c: (c.end_lineno or 0, c.end_col_offset or 0)):
        word = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
        number = count[word] = count.get(word, -1) + 1
        yield f"{tree.name}.{word}.{number}", call
