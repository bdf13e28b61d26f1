"""The code of a model that runs right now, and where a test of it lets it go on."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch


def model_frame() -> Any:
    """The frame of model code that called, if any did."""
    frame: Any = sys._getframe(1)
    while frame is not None and is_plumbing(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame


def is_plumbing(module: str) -> bool:
    """Whether code of a module is torch's or ours, and not of a model."""
    return module.split(".")[0] in ("torch", "shardwright")


def torch_goes_on() -> bool | None:
    """The truth with which torch.nn's own code goes on that asks for it; None if with either."""
    frame: Any = sys._getframe(1)
    while frame is not None and is_plumbing(name := frame.f_globals.get("__name__", "")):
        if name.startswith("torch.nn."):
            return only_way(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def torch_raises() -> bool:
    """Whether a check of torch's asks, which raises what nobody near catches if it is not true."""
    frame: Any = sys._getframe(1)
    checks = False
    while frame is not None and is_plumbing(frame.f_globals.get("__name__", "")):
        checks |= frame.f_code is torch._check_tensor_all_with.__code__
        frame = frame.f_back
    if not checks or frame is None:
        return checks
    return not any(a <= frame.f_lineno <= b for a, b in _caught(frame.f_code.co_filename))


def is_message(frame: Any) -> bool:
    """Whether a string that code in `frame` writes now is given to a call that gives nothing."""
    return any(a <= frame.f_lineno <= b for a, b in _messages(frame.f_code.co_filename))


@lru_cache(maxsize=256)
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _attempts(file: str) -> Iterator[ast.stmt]:
    """Statements of which what they raise may be caught."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, (ast.Try, ast.With)):  # a context may suppress what is raised
            yield from node.body


@lru_cache(maxsize=256)
def _caught(file: str) -> list[tuple[int, int]]:
    """First and last line of each of those."""
    return [(node.lineno, node.end_lineno or node.lineno) for node in _attempts(file)]


@lru_cache(maxsize=256)
def _messages(file: str) -> list[tuple[int, int]]:
    """First and last line of each string that is made for a call of which nobody takes a result."""
    calls = (n.value for n in ast.walk(_tree(file)) if isinstance(n, ast.Expr))
    strings = (a for c in calls if isinstance(c, ast.Call) for a in c.args)
    return [(a.lineno, a.end_lineno or a.lineno) for a in strings if isinstance(a, ast.JoinedStr)]


@lru_cache(maxsize=256)
def _tests(file: str) -> list[tuple[int, int, bool]]:
    """First and last line of each test that raises when it fails, and the truth that passes it."""
    caught = {id(node) for statement in _attempts(file) for node in ast.walk(statement)}
    out = []
    for node in ast.walk(_tree(file)):
        if id(node) in caught:
            continue
        if isinstance(node, ast.Assert):
            passes = True
        elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[0], ast.Raise):
            passes = False
        else:
            continue
        if (found := truth(node.test, passes)) is not None:
            out.append((node.test.lineno, node.test.end_lineno or node.test.lineno, found))
    return out


def truth(test: ast.expr, passes: bool) -> bool | None:
    """The answer to the one question of a test with which it `passes`; None if it has others."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, passes = test.operand, not passes
    return passes if _is_one_question(test) else None


def _is_one_question(test: ast.expr) -> bool:
    """Whether all that a test asks is whether it is true as a whole."""
    inner = (ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.comprehension, ast.Lambda, ast.Await)
    plain = not any(isinstance(node, inner) for node in ast.walk(test))
    one = not isinstance(test, ast.Compare) or len(test.ops) == 1
    member = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.In, ast.NotIn))
    asked = any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("bool", "all", "any")
        for node in ast.walk(test)
    )
    return plain and one and not member and not asked


def only_way(file: str, line: int) -> bool | None:
    """The truth of a test at this place with which code goes on; None if it does with either."""
    found = {passes for first, last, passes in _tests(file) if first <= line <= last}
    return found.pop() if len(found) == 1 else None
