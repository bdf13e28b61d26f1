"""Which call in the own code of a module gave a size?"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from shardwright.planner.trace.data_queries.model_code import is_plumbing
from shardwright.runtime.code.call_sites import method_of

THROUGH = ("torch._tensor", "torch.functional", "torch.overrides")
"""What of torch stands between a call and the mode that sees it."""


class Caller(NamedTuple):
    """A call in a method of a module, or in a function within that."""

    module: str
    method: FunctionType
    code: CodeType
    at: int
    """Where in `code` it stands, in bytes."""


def caller(names: Mapping[int, str]) -> Caller | None:
    """The call that runs now; None if a module's own code does not make it itself.

    Args:
        names: Name of each module, by its id.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and is_plumbing(name := frame.f_globals.get("__name__", "")):
        if not name.startswith(("shardwright.", *THROUGH)):
            return None
        frame = frame.f_back
    if frame is None:
        return None
    code, at = frame.f_code, frame.f_lasti
    while frame is not None and not is_plumbing(frame.f_globals.get("__name__", "")):
        here = frame.f_code
        owner = frame.f_locals.get(here.co_varnames[0]) if here.co_argcount else None
        if isinstance(owner, nn.Module):
            method = method_of(type(owner), here.co_name)
            if method is None or method.__code__ is not here or not _holds(here, code):
                return None
            return Caller(names[id(owner)], method, code, at) if id(owner) in names else None
        frame = frame.f_back
    return None


def _holds(outer: CodeType, inner: CodeType) -> bool:
    """Whether `inner` is `outer`, or of a function in it."""
    return outer is inner or any(
        _holds(c, inner) for c in outer.co_consts if isinstance(c, CodeType)
    )
