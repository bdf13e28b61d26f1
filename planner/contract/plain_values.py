"""Non-tensor arguments of calls as a plan writes them: flags, names, numbers, functions.

A function that a module defines is written by name. A lambda is written by its code, and so is a
function that another function or a script defines, which may define it differently next time. Any
other callable object is written by its class and its plain attributes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

FREE = frozenset(
    {"logits_to_keep", "output_attentions", "output_hidden_states", "return_dict", "use_cache"}
)
"""Flags that any call may have: they select from results that are proven. Other flags may run code
that no traced call ran. The root module handles each flag that changes what it returns."""

SWITCHES = ("use_cache", "output_hidden_states")
"""Of `FREE`, flags that make code keep tensors, which it may read later in the same call. If no
traced call had one on, the plan says so (`"use_cache": false`), and calls with it are refused."""

WITH_ANY = FREE | {"decoder_inputs_embeds", "inputs_embeds", "labels", "output_router_logits"}
"""Arguments that any call may have beside others. The planner traces them in calls of their own."""

CONTAINERS = (dict, list, tuple)
"""Types of arguments whose plain values are named by their place: `name.key` or `name.0`."""

BLOCK_MASK = "BlockMask"
"""The class of masks of `flex_attention`: each holds a function of its own."""

PLAIN_TYPES = (bool, int, float, str, type(None))
SET_BY_TORCH = ("training", "_is_full_backward_hook")
"""Plain attributes that torch sets on modules, which do not affect what a module computes."""

PlainValue = bool | int | float | str | None


def is_code(value: Any) -> bool:
    """Return whether it is callable and not a class."""
    return callable(value) and not isinstance(value, type)


def is_plain(value: Any) -> bool:
    """Return whether it is a value that a plan can name."""
    return isinstance(value, (*PLAIN_TYPES, Enum))


def is_said(value: Any) -> bool:
    """Return whether a plan can name it: a plain value, or code."""
    return is_plain(value) or is_code(value)


def is_number(value: Any) -> bool:
    """Return whether it is an integer or float, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    """Return whether a plan can name it, and it is not a number."""
    return isinstance(value, Enum) or (is_said(value) and not is_number(value))


def plain_within(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in lists and dicts of argument `name`, with their places, without None."""
    if type(value) not in CONTAINERS:
        return
    parts = value.items() if type(value) is dict else enumerate(value)
    for key, part in parts:
        if part is not None and is_said(part):
            yield f"{name}.{key}", part
        yield from plain_within(part, f"{name}.{key}")


def plain_value(value: Any) -> PlainValue:
    """Return a value as a plan writes it; enum members and code become their names."""
    if isinstance(value, Enum):
        return str(value)
    if is_code(value):
        return code_name(value)
    kinds = (bool, int, float, str)  # a subclass is written as its base class
    return next((kind(value) for kind in kinds if isinstance(value, kind)), None)


def same_value(one: PlainValue, other: PlainValue) -> bool:
    """Return whether code treats both as the same value: `1` is not `True`."""
    return one == other and type(one) is type(other)


def is_on(name: str, given: Mapping[str, Any], default: Any, config: Any) -> bool:
    """Return whether a call has the flag `name` on: as given, by `default`, or by its config."""
    value = given.get(name, default)
    if value is None and config is not None:
        parts = (config, getattr(config, "get_text_config", lambda **_: None)(decoder=True))
        return any(bool(getattr(part, name, False)) for part in parts)
    return bool(value)


def code_name(value: Any) -> str:
    """Return the name of code in a plan. Code that may do something else has another name."""
    return _name(value, ())


def _name(value: Any, around: tuple[Any, ...]) -> str:
    """Return the name of `value` inside the functions `around`, which may refer to themselves."""
    if any(value is one for one in around):
        return "itself"
    around = (*around, value)
    if isinstance(value, partial):
        given = [*value.args, *(x for pair in sorted(value.keywords.items()) for x in pair)]
        return f"partial({', '.join(_said(one, around) for one in (value.func, *given))})"
    if isinstance(value, MethodType):
        return f"{_said(value.__self__, around)}.{value.__name__}"
    if isinstance(value, FunctionType):
        name = f"{value.__module__}.{value.__qualname__}"
        if "<" not in name and value.__module__ != "__main__":
            return name
        cells = [_said(one, around) for one in enclosed(value)]
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        defaults = [_said(one, around) for one in given]
        made = repr([_code(value.__code__), cells, defaults])
        return f"{name} {zlib.crc32(made.encode()):08x}"
    if isinstance(value, BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return _said(value, around)


def enclosed(function: FunctionType) -> Iterator[Any]:
    """Yield the values of a function's closure that are set."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell.cell_contents


def _said(value: Any, around: tuple[Any, ...]) -> str:
    if isinstance(value, PLAIN_TYPES):
        return repr(value)
    if isinstance(value, (partial, MethodType, FunctionType, BuiltinFunctionType)):
        return _name(value, around)
    own = getattr(value, "__dict__", {}).items()
    kept = sorted((n, v) for n, v in own if isinstance(v, PLAIN_TYPES) and n not in SET_BY_TORCH)
    return f"{type(value).__module__}.{type(value).__qualname__}{kept or ''}"


def _code(code: CodeType) -> Any:
    consts = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code.hex(), code.co_names, consts
