"""Refuse code of forwards that asks what ranks would answer otherwise than the unsharded model.

Whether two tensors are one (`is`): ranks redistribute each argument apart, and each name of a tied
weight. Which class a module or parameter has (`type(m) is nn.Linear`): it is a subclass.
"""

from __future__ import annotations

import ast
import dis
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from textwrap import dedent
from types import CodeType, FrameType, FunctionType
from typing import Any, cast

from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.planner.trace.data_queries.model_code import is_plumbing
from shardwright.runtime.code.names_in_code import forwards_of
from shardwright.runtime.code.source import codes_in

IS = dis.opmap["IS_OP"]
ASKING = {"type", "__class__"}
UNKNOWN = object()
"""In place of a value that cannot be looked up without running code."""


@contextmanager
def checked(model: nn.Module) -> Iterator[None]:
    """Context manager in which code of forwards may not compare tensors by `is`.

    Raises:
        ModelError: some does; or some that a forward may run asks for the class of a module.
    """
    compared: dict[CodeType, list[ast.Compare]] = {}
    for function in forwards_of(model):
        nodes = _comparisons(function)
        _check_classes(function, nodes)
        if by_is := [node for node in nodes if _compares_variables(node)]:
            compared |= dict.fromkeys(codes_in(function.__code__), by_is)
    if not compared:
        yield
        return
    found: list[tuple[str, str]] = []
    before = sys.gettrace()

    def line(frame: FrameType, _event: str, _: Any) -> Any:
        for node in compared[frame.f_code]:
            values = [_value(side, frame) for side in _sides(node)]
            tensors = [isinstance(value, Tensor) for value in values]
            if any(tensors) and all(
                a or b is UNKNOWN for a, b in zip(tensors, values, strict=True)
            ):
                found.append((frame.f_code.co_qualname, ast.unparse(node)))
        return line

    sys.settrace(lambda frame, _event, _: line if frame.f_code in compared else None)
    try:
        yield
    finally:
        sys.settrace(before)
    for name, text in found:
        raise ModelError(
            f"cannot split '{name}': its code asks whether two tensors are one ({text}). Ranks "
            "redistribute each apart, and would answer otherwise: ask before the model is planned, "
            "and keep or pass the answer"
        )


def _check_classes(function: FunctionType, comparisons: Sequence[ast.Compare]) -> None:
    for node in comparisons:
        sides = _sides(node)
        if any(map(_asks_class, sides)) and any(
            _is_subclassed(x, function.__globals__) for x in sides
        ):
            raise ModelError(
                f"cannot split '{function.__qualname__}': its code asks for the class of a module "
                f"or parameter ({ast.unparse(node)}), which is a subclass in a split model: use "
                "isinstance"
            )


@cache
def _comparisons(function: FunctionType) -> list[ast.Compare]:
    """Return the comparisons in a function that may be of interest.

    Torch's own code computes the same with either answer.
    """
    asks = any(
        IS in code.co_code[::2] or not ASKING.isdisjoint(code.co_names)
        for code in codes_in(function.__code__)
    )
    if not asks or is_plumbing(function.__module__):
        return []
    try:
        tree = ast.parse(dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]


def _compares_variables(node: ast.Compare) -> bool:
    """Whether a comparison is by `is`, and not with a constant or a class."""
    by_is = isinstance(node.ops[0], (ast.Is, ast.IsNot))
    return by_is and not any(isinstance(x, ast.Constant) or _asks_class(x) for x in _sides(node))


def _sides(node: ast.Compare) -> list[ast.expr]:
    sides = [node.left, *node.comparators]
    return [x for side in sides for x in getattr(side, "elts", [side])]


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a variable, of its attribute or of an item with a constant key."""
    match node:
        case ast.Name(name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(of, key) | ast.Subscript(of, ast.Constant(key)):
            base, at = _value(of, frame), cast("Any", key)
        case _:
            return UNKNOWN
    if base is UNKNOWN or isinstance(base, Tensor):
        return UNKNOWN
    try:
        if isinstance(node, ast.Attribute):
            return getattr(base, at)
        return base[at] if isinstance(base, (tuple, list, dict)) else None
    except Exception:  # properties may raise anything, as may keys that are not there yet
        return None


def _asks_class(node: ast.expr) -> bool:
    by_type = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type"
    return by_type or getattr(node, "attr", "") == "__class__"


def _is_subclassed(node: ast.expr, names: Mapping[str, Any]) -> bool:
    """Whether an expression is the name of a class of modules or parameters."""
    first, *rest = ast.unparse(node).split(".")
    value = names.get(first)
    for name in rest:
        value = getattr(value, name, None)
    return isinstance(value, type) and issubclass(value, (nn.Module, nn.Parameter))
