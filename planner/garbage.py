"""Keep Python from looking for garbage in cycles, which planning hardly makes, while it plans.

A full look goes through all that torch and transformers hold as well: 0.15 to 0.2 s each time,
which is as long as a third of a plan. What is left by then is found when the next look is due.

It is one switch for all threads. Where several plan, the first to end may turn it on again, and the
others take longer; once all have ended it is as it was before the first.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, the cyclic garbage collector is off; afterwards as before."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
