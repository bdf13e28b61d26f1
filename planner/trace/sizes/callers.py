"""Find the call in a module's own code that passed a size."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import NamedTuple

from torch import nn

from shardwright.planner.trace.data_queries.model_code import frames, is_plumbing, module_of
from shardwright.planner.trace.thread_patches import patched_in_this_thread
from shardwright.runtime.code.call_sites import method_of
from shardwright.runtime.code.source import codes_in

THROUGH = (
    "torch._tensor",
    "torch.functional",
    "torch.overrides",
    patched_in_this_thread.__module__,
)
"""Python modules between a call and the function mode or the patch that sees it."""


class Caller(NamedTuple):
    """A call in a method of a module, or in a function nested in the method."""

    module: str
    method: FunctionType
    code: CodeType
    at: int
    """Byte offset of the call in `code`."""


def in_model_code() -> bool:
    """Return whether code of a model, not torch's, makes the current call."""
    for frame in frames():
        name = module_of(frame)
        if not is_plumbing(name):
            return True
        if not name.startswith((f"{__package__}.", *THROUGH)):
            return False
    return False


def caller(names: Mapping[int, str]) -> Caller | None:
    """Return the current call; None if it is not made by a module's own code.

    Args:
        names: Id of a module -> name of the module.
    """
    first = None
    for frame in frames():
        name, here = module_of(frame), frame.f_code
        if is_plumbing(name):
            if first or not name.startswith(("shardwright.", *THROUGH)):
                return None
            continue
        first = first or (here, frame.f_lasti)
        owner = frame.f_locals.get(here.co_varnames[0]) if here.co_argcount else None
        if isinstance(owner, nn.Module):
            method, (code, at) = method_of(type(owner), here.co_name), first
            if method is None or method.__code__ is not here or code not in codes_in(here):
                return None
            return Caller(names[id(owner)], method, code, at) if id(owner) in names else None
    return None
