"""Autocasting by the device of a tensor, where that is meta: there torch knows of none.

What is cast says nothing about how it is split.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def known_on_meta() -> Iterator[None]:
    """Within, `torch.autocast("meta")` casts nothing, and does not raise."""
    before = torch.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        before(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.autocast.__init__ = init
    try:
        yield
    finally:
        torch.autocast.__init__ = before
