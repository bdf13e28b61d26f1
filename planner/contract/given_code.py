"""What a plan says of functions that a model is given as arguments: its code runs them on parts.

One that is defined in a module goes by its name; a lambda, or one defined in a function or in a
script (which may define it anew), by what it does, and any other object that can be called by its
class and the plain values in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

PLAIN = (bool, int, float, str, type(None))
OF_MODULES = ("training", "_is_full_backward_hook")
"""What torch keeps in modules: whether they train is seen to elsewhere."""


def is_code(value: Any) -> bool:
    """Whether it is something to call."""
    return callable(value) and not isinstance(value, type)


def code_name(value: Any) -> str:
    """What a plan calls it; another for what may do something else."""
    return _name(value, ())


def _name(value: Any, around: tuple[Any, ...]) -> str:
    """The same of what is within the functions `around`, which may call themselves."""
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
        cells = [_said(one, around) for one in _enclosed(value)]
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        defaults = [_said(one, around) for one in given]
        made = repr([_code(value.__code__), cells, defaults])
        return f"{name} {zlib.crc32(made.encode()):08x}"
    if isinstance(value, BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return _said(value, around)


def _enclosed(function: FunctionType) -> Iterator[Any]:
    """What its variables from around it are; not those that have no value yet."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell.cell_contents


def _said(value: Any, around: tuple[Any, ...]) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (partial, MethodType, FunctionType, BuiltinFunctionType)):
        return _name(value, around)
    own = getattr(value, "__dict__", {}).items()
    kept = sorted((n, v) for n, v in own if isinstance(v, PLAIN) and n not in OF_MODULES)
    return f"{type(value).__module__}.{type(value).__qualname__}{kept or ''}"


def _code(code: CodeType) -> Any:
    consts = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code.hex(), code.co_names, consts
