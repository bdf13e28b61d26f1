"""Refuse code of forwards that asks by `is` whether two tensors are one.

On ranks each argument is redistributed apart, and so is each name of a tied weight: that code would
answer otherwise than in the unsharded model.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from textwrap import dedent
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.trace.data_queries.model_code import is_plumbing
from shardwright.runtime.code.names_in_code import forwards_of, methods_of

IS = dis.opmap["IS_OP"]


def check_arguments(path: str, module: nn.Module, given: Mapping[str, Any]) -> None:
    """Check that the code of the module `path` does not compare tensors that it is `given`.

    Raises:
        ModelError: it does.
    """
    for pair in _compared_in(type(module)):
        if all(isinstance(given.get(name), torch.Tensor) for name in pair):
            _refuse(f"'{path}'" if path else type(module).__name__, pair, "pass the answer")


def check_tied(model: nn.Module) -> None:
    """Check that no code that a forward may run compares tied weights of `model`.

    Raises:
        ModelError: some does.
    """
    named = [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    names = Counter(key for _, key in named)
    tied = {name.rpartition(".")[2] for name, key in named if names[key] > 1}
    for function in forwards_of(model) if tied else ():
        for pair in _compared(function, ast.Attribute):
            if tied.issuperset(pair):
                _refuse(f"'{function.__qualname__}'", pair, "keep the answer in an attribute")


@cache
def _compared_in(kind: type) -> list[tuple[str, str]]:
    return [pair for f in methods_of([kind]) for pair in _compared(f, ast.Name)]


def _compared(function: FunctionType, kind: type) -> Iterator[tuple[str, str]]:
    """Yield the pairs of names, or of attributes, that a function compares by `is`.

    Torch's own code computes the same with either answer.
    """
    if is_plumbing(function.__module__) or IS not in function.__code__.co_code[::2]:
        return
    try:
        tree = ast.parse(dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            sides: list[Any] = [node.left, *node.comparators]
            names = [vars(x).get("attr") or vars(x).get("id") for x in sides if type(x) is kind]
            yield from pairwise(names)


def _refuse(place: str, pair: tuple[str, str], instead: str) -> NoReturn:
    raise ModelError(
        f"cannot split {place}: its code asks whether two tensors are one ({' is '.join(pair)}). "
        "Ranks redistribute each apart, and would answer otherwise: ask before the model is "
        f"planned, and {instead}"
    )
