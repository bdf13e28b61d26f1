"""Turns the cyclic garbage collector off while planning, which makes hardly any cycles.

A full collection also goes through everything that torch and transformers hold: 0.15 to 0.2 s each
time, as long as a third of a plan. Cycles made meanwhile are found by the next collection.

The switch is one for all threads. If several threads plan, the first to end may turn the collector
on again, and the others take longer. Once all have ended, the setting is that of before the first.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the cyclic garbage collector off within the context, and restore it afterwards."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
