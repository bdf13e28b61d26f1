"""What a plan says of functions that a model is given as arguments: its code runs them on parts.

One that is defined in a module goes by its name; a lambda, or one defined in a function, by what it
does, and any other object that can be called by its class and the plain values in it.
"""

from __future__ import annotations

import zlib
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
    if isinstance(value, partial):
        given = [*value.args, *(x for pair in sorted(value.keywords.items()) for x in pair)]
        return f"partial({', '.join(map(_said, (value.func, *given)))})"
    if isinstance(value, MethodType):
        return f"{_said(value.__self__)}.{value.__name__}"
    if isinstance(value, FunctionType):
        name = f"{value.__module__}.{value.__qualname__}"
        if "<" not in name:
            return name
        cells = [_said(cell.cell_contents) for cell in value.__closure__ or ()]
        made = repr([_code(value.__code__), cells, [*map(_said, value.__defaults__ or ())]])
        return f"{name} {zlib.crc32(made.encode()):08x}"
    if isinstance(value, BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return _said(value)


def _said(value: Any) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (partial, MethodType, FunctionType, BuiltinFunctionType)):
        return code_name(value)
    own = getattr(value, "__dict__", {}).items()
    kept = sorted((n, v) for n, v in own if isinstance(v, PLAIN) and n not in OF_MODULES)
    return f"{type(value).__module__}.{type(value).__qualname__}{kept or ''}"


def _code(code: CodeType) -> Any:
    consts = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code.hex(), code.co_names, consts
