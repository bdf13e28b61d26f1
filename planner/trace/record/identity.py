"""Refuse code of forwards that asks what ranks would answer otherwise than the unsharded model.

Whether two tensors are one (`is`): ranks redistribute each argument apart, and each name of a tied
weight. Which class a module has (`type(m) is nn.Linear`): it is a subclass.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from textwrap import dedent
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.trace.data_queries.model_code import is_plumbing
from shardwright.runtime.code.names_in_code import forwards_of, methods_of

IS = dis.opmap["IS_OP"]
ASKING = {"type", "__class__"}


def check_arguments(path: str, module: nn.Module, given: Mapping[str, Any]) -> None:
    """Check that the code of the module `path` does not compare tensors that it is `given`.

    Neither with each other, nor with what it keeps of an earlier call.

    Raises:
        ModelError: it does.
    """
    for pair in _compared_in(type(module)):
        tensors = [name for name in pair if isinstance(given.get(name), torch.Tensor)]
        if tensors and all(name in tensors or name.startswith("self.") for name in pair):
            _refuse(f"'{path}'" if path else type(module).__name__, pair, "pass the answer")


def check_forwards(model: nn.Module) -> None:
    """Check that no code that a forward may run compares tied weights, or classes of modules.

    Raises:
        ModelError: some does.
    """
    named = [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    names = Counter(key for _, key in named)
    tied = {name.rpartition(".")[2] for name, key in named if names[key] > 1}
    for function in forwards_of(model):
        for node in _comparisons(function):
            if tied.issuperset(pair := _attributes(node)) and len(pair) > 1:
                _refuse(f"'{function.__qualname__}'", pair, "keep the answer in an attribute")
            if any(map(_asks_class, sides := _sides(node))) and any(
                _is_module_class(x, function.__globals__) for x in sides
            ):
                raise ModelError(
                    f"cannot split '{function.__qualname__}': its code asks for the class of a "
                    f"module ({ast.unparse(node)}), which is a subclass in a split model: use "
                    "isinstance"
                )


@cache
def _compared_in(kind: type) -> list[list[str]]:
    """Return the names, and what of `self`, that code of a class compares by `is`."""
    compared = (node for f in methods_of([kind]) for node in _comparisons(f) if _by_is(node))
    return [[*map(ast.unparse, _sides(node))] for node in compared]


@cache
def _comparisons(function: FunctionType) -> list[ast.Compare]:
    """Return the comparisons in a function that may be of interest.

    Torch's own code computes the same with either answer.
    """
    code = function.__code__
    asks = IS in code.co_code[::2] or not ASKING.isdisjoint(code.co_names)
    if not asks or is_plumbing(function.__module__):
        return []
    try:
        tree = ast.parse(dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]


def _by_is(node: ast.Compare) -> bool:
    return isinstance(node.ops[0], (ast.Is, ast.IsNot))


def _sides(node: ast.Compare) -> list[ast.expr]:
    sides = [node.left, *node.comparators]
    return [x for side in sides for x in getattr(side, "elts", [side])]


def _attributes(node: ast.Compare) -> list[str]:
    """Return the names of the attributes that a comparison by `is` has."""
    return [x.attr for x in _sides(node) if isinstance(x, ast.Attribute) and _by_is(node)]


def _asks_class(node: ast.expr) -> bool:
    by_type = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type"
    return by_type or getattr(node, "attr", "") == "__class__"


def _is_module_class(node: ast.expr, names: Mapping[str, Any]) -> bool:
    """Whether an expression is the name of a class of modules."""
    first, *rest = ast.unparse(node).split(".")
    value = names.get(first)
    for name in rest:
        value = getattr(value, name, None)
    return isinstance(value, type) and issubclass(value, nn.Module)


def _refuse(place: str, pair: Sequence[str], instead: str) -> NoReturn:
    raise ModelError(
        f"cannot split {place}: its code asks whether two tensors are one ({' is '.join(pair)}). "
        "Ranks redistribute each apart, and would answer otherwise: ask before the model is "
        f"planned, and {instead}"
    )
