"""Whether a planned call of a split model runs in this thread: who sees parts, who full tensors.

There are three answers. In a planned call code sees this rank's parts. Code that knows of no parts
but runs in the place of a module, or is the own code of a module that is called directly and that
the plan says nothing of, sees full plain tensors. All other code, hooks among it, sees DTensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PlannedCall(threading.local):
    """Shared by the modules of one split model.

    Who sets `active` or `full` sets it back in its own frame: that is done for each step.
    """

    active = False
    """Whether a planned call runs: modules exchange tensors as the plan has them."""
    full = False
    """Whether code runs that sees full tensors, and calls modules directly."""
    in_hook = False
    """Whether a hook of a user runs."""
    hook_views: tuple[Any, ...] = ()
    """What hooks were shown in this call in the place of what the model goes on with."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedCall:
        return memo.setdefault(id(self), PlannedCall())

    def __reduce__(self) -> Any:
        return PlannedCall, ()


class AlwaysPlanned:
    """In its place for a layer that was made by itself: it takes parts, whoever calls it."""

    active = True
    full = in_hook = False


ALWAYS = AlwaysPlanned()


@contextmanager
def in_hook(call: PlannedCall | AlwaysPlanned) -> Iterator[None]:
    """Within, a hook runs: modules that it calls are called directly, and it sees DTensors."""
    if isinstance(call, AlwaysPlanned):
        yield
        return
    outer = call.active, call.full, call.in_hook, call.hook_views
    call.active, call.full, call.in_hook, call.hook_views = False, False, True, ()
    try:
        yield
    finally:
        call.active, call.full, call.in_hook, call.hook_views = outer
