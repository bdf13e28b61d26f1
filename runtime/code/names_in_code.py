"""The names in the code of a model: what it reads, calls, and accesses by a string."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from inspect import isfunction
from types import CodeType, FunctionType
from typing import Any

from torch import nn

NOT_MODELS = (
    *("torch.", "builtins.", "shardwright.", "transformers.modeling_utils."),
    *("transformers.generation.", "transformers.integrations.", "transformers.utils."),
)
"""Packages whose code does not determine what a model computes, though models inherit from it."""


class ReadNames:
    """The names that the code of a model reads, in its modules' classes and in their files.

    Code that only builds modules (`__init__`, `_init_weights`) is left out.

    Attributes:
        names: Every name and string.
        in_forwards: The names in code that a forward may run, also in torch's layers. Which
            functions it calls is found by name.
    """

    def __init__(self, model: nn.Module) -> None:
        functions = [*_functions(model)]
        self.names = frozenset(names_in(f.__code__ for f in functions))
        of: dict[str, list[FunctionType]] = {}
        for function in (*functions, *_of_torch(model)):
            of.setdefault(function.__name__, []).append(function)
        found, todo = set[str](), ["forward", "__call__", "__getattr__"]
        while todo:
            more = {*names_in(f.__code__ for f in of.pop(todo.pop(), ()))} - found
            found |= more
            todo += more
        self.in_forwards = frozenset(found)


def names_in(codes: Iterable[CodeType]) -> Iterator[str]:
    """Every name and string in code objects, and in functions within them."""
    for code in codes:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, str):
                yield constant
            elif isinstance(constant, CodeType):
                yield from names_in([constant])


def _functions(model: nn.Module) -> Iterator[FunctionType]:
    kinds = {
        kind
        for own in {type(m) for m in model.modules()}
        for kind in own.__mro__
        if not f"{kind.__module__}.".startswith(NOT_MODELS)
    }
    for home in {kind.__module__ for kind in kinds}:
        beside = list(vars(sys.modules[home]).values()) if home in sys.modules else []
        kinds |= {v for v in beside if isinstance(v, type) and v.__module__ == home}
        yield from _but_builders(v for v in beside if not isinstance(v, type))
    for kind in kinds:
        yield from _but_builders(vars(kind).values())


def _of_torch(model: nn.Module) -> Iterator[FunctionType]:
    kinds = {kind for own in {type(m) for m in model.modules()} for kind in own.__mro__}
    for kind in kinds:
        if kind.__module__.startswith("torch.nn.modules.") and kind is not nn.Module:
            yield from _but_builders(vars(kind).values())


def _but_builders(members: Iterable[Any]) -> Iterator[FunctionType]:
    for function in filter(isfunction, map(_unwrapped, members)):
        if function.__name__ not in ("__init__", "_init_weights"):
            yield function


def _unwrapped(member: Any) -> Any:
    """The function behind a property, a static or class method, or a decorator."""
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    while type(member) is not type and "__wrapped__" in getattr(member, "__dict__", ()):
        member = member.__wrapped__
    return member
