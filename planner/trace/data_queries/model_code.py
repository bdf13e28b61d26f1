"""Find the line of model code that queries data, and whether one answer makes it raise.

An `assert`, or an `if` that raises, gets the answer with which the code goes on.
"""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
CALLED_THROUGH = ("torch.overrides", "torch._tensor", str(__package__))
"""Python modules through which code calls tensor functions."""

Lines = tuple[tuple[str, int], ...]
"""Files and numbers of lines of code, the innermost last."""


def model_frame(calls_itself: bool = False) -> Any:
    """Return the innermost frame of model code, or None.

    With `calls_itself`, returns None if torch's code, not the model's, makes the call.
    """
    for frame in frames():
        module = module_of(frame)
        if not is_plumbing(module):
            return frame
        through = frame.f_code.co_name == "__torch_function__" or module.startswith(CALLED_THROUGH)
        if calls_itself and not through:
            return None
    return None


def frames() -> Iterator[Any]:
    """Yield the frames of this thread, beginning with the one that iterates."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: Any) -> str:
    """Return the name of the Python module whose code a frame runs."""
    return frame.f_globals.get("__name__", "")


def is_plumbing(module: str) -> bool:
    """Return whether a Python module belongs to torch or Shardwright, not to a model."""
    return module.split(".")[0] in ("torch", "shardwright")


@lru_cache(maxsize=256)
def parsed(file: str) -> ast.Module:
    """Parse a file; a file with a syntax error gives an empty module."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def own(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes of some statements, without functions in them."""
    for node in body:
        if not isinstance(node, NESTED):
            yield node
            yield from own(ast.iter_child_nodes(node))


def is_at(node: ast.AST, line: int) -> bool:
    """Return whether the lines of a node include `line`."""
    return node.lineno <= line <= (node.end_lineno or node.lineno)  # type: ignore[attr-defined]


def answer_that_goes_on(file: str, line: int) -> bool | None:
    """Return the answer with which a test on a line does not raise; None without such a test."""
    tests, _ = _tests(file)
    found = {answer for test, answer in tests if is_at(test, line)}
    return found.pop() if len(found) == 1 else None


def torch_goes_on() -> bool | None:
    """Return the answer with which a test in code of torch.nn does not raise, or None.

    Such code runs without the mode that answers queries of models. Returns None if both answers go
    on, or if the model may catch the exception.
    """
    own = takewhile(lambda frame: is_plumbing(module_of(frame)), frames())
    frame = next((f for f in own if module_of(f).startswith("torch.nn.")), None)
    model = model_frame()
    if frame is None or model is None or may_be_caught(model.f_code.co_filename, model.f_lineno):
        return None
    return answer_that_goes_on(frame.f_code.co_filename, frame.f_lineno)


def may_be_caught(file: str, line: int) -> bool:
    """Return whether an exception raised on a line may be caught in the file."""
    return any(is_at(node, line) for node in _tests(file)[1])


@lru_cache(maxsize=256)
def _tests(file: str) -> tuple[list[tuple[ast.expr, bool]], list[ast.AST]]:
    """Return tests that raise if they fail, with the passing answer, and nodes in `try`, `with`."""
    nodes = [*ast.walk(parsed(file))]
    # A context manager may suppress exceptions.
    caught = [s for n in nodes if isinstance(n, (ast.Try, ast.With)) for s in n.body]
    safe = {id(n) for statement in caught for n in ast.walk(statement)}
    out = []
    for node in (n for n in nodes if id(n) not in safe):
        match node:
            case ast.Assert(test=test):
                answer = answer_for(test, True)
            case ast.If(test=test, body=[ast.Raise(), *_], orelse=[]):
                answer = answer_for(test, False)
            case _:
                continue
        if answer is not None:
            out.append((test, answer))
    return out, caught  # type: ignore[return-value]


def answer_for(test: ast.expr, wanted: bool) -> bool | None:
    """Return the answer to a test's only query that makes it `wanted`; None if it has several."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, wanted = test.operand, not wanted
    for node in ast.walk(test):
        match node:
            case ast.BoolOp() | ast.UnaryOp() | ast.IfExp() | ast.comprehension() | ast.Lambda():
                return None
            case ast.Await() | ast.Call(func=ast.Name(id="bool" | "all" | "any")):
                return None
    match test:
        case ast.Compare(ops=[_, _, *_]) | ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return None
    return wanted


def lines_of(error: BaseException) -> Lines:
    """Return the lines of code that an error came through: not of torch, Python and our own."""
    found = traceback.walk_tb(error.__traceback__)
    own = ((f, n) for f, n in found if not is_plumbing(module_of(f)))
    names = sys.stdlib_module_names
    return tuple(
        (f.f_code.co_filename, n) for f, n in own if module_of(f).split(".")[0] not in names
    )


def place_of(error: BaseException) -> str:
    """Return where code raised an error, as " (modeling.py:12)"; "" if no code of a model did."""
    return "".join(f" ({Path(file).name}:{line})" for file, line in lines_of(error)[-1:])
