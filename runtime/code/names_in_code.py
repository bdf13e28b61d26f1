"""The names in the code of a model: what it reads, calls, and accesses by a string."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from inspect import isfunction
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from shardwright.planner.contract.names import grouped
from shardwright.runtime.code.source import codes_in

NOT_MODELS = (
    *("torch.", "builtins.", "shardwright.", "transformers.modeling_utils."),
    *("transformers.generation.", "transformers.integrations.", "transformers.utils."),
)
"""Packages whose code does not determine what a model computes, though models inherit from it."""

CALLED = {"forward", "__call__", "__getattr__"}
"""Methods that run when a module is called, without being named in code."""


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
        of = grouped((f.__name__, f) for f in (*functions, *_of_torch(model)))
        self.in_forwards = frozenset(_reached(of, CALLED))


def forwards_of(model: nn.Module) -> list[FunctionType]:
    """The methods of a model's classes, and functions beside these, that a forward may run.

    They are found by name. Functions in attributes of modules are among them.
    """
    kinds = classes_of(model)
    beside = [v for home in {kind.__module__ for kind in kinds} for v in globals_of(home)]
    members = [v for kind in kinds for v in vars(kind).values()]
    functions = [*_but_builders(v for v in (*members, *beside) if not isinstance(v, type))]
    held = [v for m in model.modules() for v in vars(m).values() if isfunction(v)]
    called = CALLED.union(names_in(f.__code__ for f in held))
    names = called | _reached(grouped((f.__name__, f) for f in functions), called)
    return [*held, *(f for f in functions if f.__name__ in names)]


def names_read(own: type, kinds: frozenset[type]) -> set[str]:
    """The names in methods of a module's `own` class, and in those methods that these call.

    They call methods of `kinds`, the classes of all modules in the module. What a forward of a
    module in it reads is left out.
    """
    functions = methods_of(kinds)
    of = grouped((f.__name__, f) for f in functions if f.__name__ not in ("forward", "__call__"))
    names = names_in(f.__code__ for f in methods_of([own]))
    return names | _reached(of, names)


def _reached(of: dict[str, list[FunctionType]], first: Iterable[str]) -> set[str]:
    """The names in functions of these names, and in those that they call; `of` gets empty."""
    found, todo = set[str](), [*first]
    while todo:
        more = names_in(f.__code__ for f in of.pop(todo.pop(), ())) - found
        found |= more
        todo += more
    return found


def names_in(codes: Iterable[CodeType]) -> set[str]:
    """Every name and string in code objects, and in functions within them."""
    return set[str]().union(*map(_names_of, codes))


@lru_cache(4096)
def _names_of(code: CodeType) -> frozenset[str]:
    found = set[str]()
    for within in codes_in(code):
        found.update(within.co_names, (c for c in within.co_consts if isinstance(c, str)))
    return frozenset(found)


def classes_of(model: nn.Module) -> set[type]:
    """The classes of a model's modules and what they inherit from, but those of `NOT_MODELS`."""
    return {k for k in every_class_of(model) if not f"{k.__module__}.".startswith(NOT_MODELS)}


def every_class_of(model: nn.Module) -> set[type]:
    """The classes of a model's modules, and all that they inherit from."""
    return {kind for own in {type(m) for m in model.modules()} for kind in own.__mro__}


def is_of_framework(kind: type) -> bool:
    """Whether `kind` is a class that all models share: nobody changes it for one model."""
    home = f"{kind.__module__}."
    return kind in (object, nn.Module) or home.startswith(
        tuple(place for place in NOT_MODELS if place != "torch.")
    )


def globals_of(file: str) -> list[Any]:
    """The values of the globals of a Python module, by its name."""
    return list(vars(sys.modules[file]).values()) if file in sys.modules else []


def _functions(model: nn.Module) -> Iterator[FunctionType]:
    kinds = classes_of(model)
    for home in {kind.__module__ for kind in kinds}:
        beside = globals_of(home)
        kinds |= {v for v in beside if isinstance(v, type) and v.__module__ == home}
        yield from _but_builders(v for v in beside if not isinstance(v, type))
    for kind in kinds:
        yield from _but_builders(vars(kind).values())


def _of_torch(model: nn.Module) -> Iterator[FunctionType]:
    for kind in every_class_of(model):
        if kind.__module__.startswith("torch.nn.modules.") and kind is not nn.Module:
            yield from _but_builders(vars(kind).values())


def methods_of(kinds: Iterable[type]) -> Iterator[FunctionType]:
    """The methods of classes and of what they inherit from, but those that build modules."""
    for kind in {kind for own in {*kinds} for kind in own.__mro__ if kind not in nn.Module.__mro__}:
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
