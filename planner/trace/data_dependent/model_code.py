"""The code of a model that runs right now, and where a test of it lets it go on."""

from __future__ import annotations

import ast
import linecache
import sys
from functools import lru_cache
from typing import Any


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


@lru_cache(maxsize=256)
def _tests(file: str) -> list[tuple[int, int, bool]]:
    """First and last line of each test that raises when it fails, and the truth that passes it."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    caught = {
        id(node)
        for attempt in ast.walk(tree)
        if isinstance(attempt, (ast.Try, ast.With))  # a context may suppress what is raised
        for statement in attempt.body
        for node in ast.walk(statement)
    }
    out = []
    for node in ast.walk(tree):
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
