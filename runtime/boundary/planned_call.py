"""Whether a planned call of a split model runs in this thread, which decides what code sees.

There are three cases. In a planned call, code sees local tensors. Full plain tensors are seen by
modules that replace others, and by a module that is called directly and that the plan does not
change. All other code, hooks included, sees DTensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PlannedCall(threading.local):
    """What runs in this thread; shared by the modules of one split model.

    Calls of modules set `active` or `full` and restore it in the same function, as this happens at
    each step.
    """

    def __init__(self, always: bool = False) -> None:  # again in each thread
        self.always = always
        """Whether it is that of a layer in no split model, which always takes local tensors."""
        self.active = always
        """Whether a planned call runs: modules exchange tensors in the planned placements."""
        self.full = False
        """Whether code runs that sees full tensors and calls modules directly."""
        self.in_hook = False
        """Whether a user's hook runs."""
        self.hook_views: tuple[Any, ...] = ()
        """The full tensors that hooks saw in this call (`HookView`)."""


ALWAYS = PlannedCall(always=True)


@contextmanager
def in_hook(call: PlannedCall) -> Iterator[None]:
    """Inside, a hook runs: it sees DTensors, and calls modules directly."""
    if call.always:
        yield
        return
    outer = call.active, call.full, call.in_hook, call.hook_views
    call.active, call.full, call.in_hook, call.hook_views = False, False, True, ()
    try:
        yield
    finally:
        call.active, call.full, call.in_hook, call.hook_views = outer
