"""Other code around the forward of a module, or in its place, for a while.

It stands where the runtime changes what enters and leaves: inside of the hooks that users have on
the module, which so see the tensors as other modules do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def put_around(module: nn.Module, around: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Have `module` run `around(its forward)`; gives what undoes it."""
    return _put(module, around(module.forward), around)


def put_instead(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Have `module` run `forward`, within what was put around; gives what undoes it."""
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
