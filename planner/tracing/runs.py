"""The calls that a plan is made for: that of the root, and others that run more of its modules.

All are traced into one graph, one after the other, so that what a module does is the same in each
of them. What a plan costs is what the first costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn


class Run(NamedTuple):
    """A call of the root (""), or of a module in it by itself; tensors are on meta."""

    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Runner(nn.Module):
    """Makes several runs of `root` in its forward; `begin` is told the number of each."""

    def __init__(self, root: nn.Module, begin: Callable[[int], None] = lambda turn: None) -> None:
        super().__init__()
        self.root = root
        self.begin = begin

    def forward(self, runs: Sequence[Run]) -> list[Any]:
        """What each of `runs` returns, in their order."""
        found = []
        for turn, (module, args, kwargs) in enumerate(runs):
            self.begin(turn)
            found.append(self.root.get_submodule(module)(*args, **kwargs))
        return found
