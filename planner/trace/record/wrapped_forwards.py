"""Temporarily wrap or replace the forward of a module.

The wrapper is where the runtime reshards inputs and outputs: inside of the hooks that users have on
the module. Hooks therefore see tensors as other modules see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def put_around(module: nn.Module, around: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Make `module` run `around(its forward)`; returns a function that undoes it."""
    return _put(module, around(module.forward), around)


def put_instead(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Make `module` run `forward` within its present wrapper; returns a function that undoes it."""
    around = getattr(module.__dict__.get("forward"), "around", None)
    return _put(module, around(forward) if around else forward, around)


def _put(module: nn.Module, forward: Any, around: Any) -> Callable[[], None]:
    missing = object()
    before: Any = module.__dict__.get("forward", missing)

    def undo() -> None:
        module.__dict__.pop("forward", None)
        if before is not missing:
            module.__dict__["forward"] = before

    forward.around = around
    module.__dict__["forward"] = forward
    return undo
