"""Copies of modules whose code does the same in the same order."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TypeVar

from torch import nn

T = TypeVar("T", bound=nn.Module)
OWN = vars(nn.Module()).keys()


def duplicate(module: T, memo: Mapping[int, object] | None = None) -> T:
    """A deep copy of `module`, but for sets that model code keeps: those are shared.

    The copy of a set may be iterated in another order, and calls made in a loop over it with it.
    `memo` is as for `copy.deepcopy`.
    """
    shared = {
        id(value): value
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in OWN and isinstance(value, (set, frozenset))
    }
    return copy.deepcopy(module, {**shared, **(memo or {})})
