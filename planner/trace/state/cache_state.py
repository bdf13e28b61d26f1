"""Tensors that runs find and leave in the state that they are given, such as a cache.

Some modules keep a part of a cache in attributes, which belongs to the state too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.record.aliases import Aliases
from shardwright.planner.trace.runs.run import State
from shardwright.runtime.slots import is_own, leaves


class States:
    """The states of recorded runs of `root`.

    Attributes:
        classes: For each run: argument -> class of the state, for objects of own classes.
        given: For each run, the arguments that are its state.
        pairs: Tensors in a state before a run, and the tensors in their place after it.
    """

    def __init__(self, root: nn.Module, aliases: Aliases) -> None:
        self.root, self.aliases = root, aliases
        self.classes: list[dict[str, str]] = []
        self.given: list[list[str]] = []
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before: dict[str, torch.Tensor] = {}

    def begin(self, state: State) -> None:
        """Note that a run begins with `state`."""
        self.given.append([*state])
        self.classes.append({n: type(v).__name__ for n, v in state.items() if is_own(v)})
        self._before = {slot: inner(x) for slot, x in self._found(state)}

    def end(self, state: State, given: list[torch.Tensor]) -> None:
        """Note that the run ends with `state` and has returned the tensors `given`.

        A changed tensor that is also returned makes no pair.
        """
        for slot, x in self._found(state):
            before, now = self._before.get(slot), inner(x)
            if before is not None and (now is before or not self.aliases.among(x, given)):
                self.pairs.append((before, now))

    def _found(self, state: State) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors in `state`, and those in module attributes, with their slots.

        Yields nothing from attributes if the state is empty.
        """
        yield from _tensors(state)
        for path, module in self.root.named_modules() if state else ():
            kept = {name: v for name, v in vars(module).items() if isinstance(v, torch.Tensor)}
            yield from ((f"{path}:{slot}", tensor) for slot, tensor in _tensors(kept))


def _tensors(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the nonempty floating tensors in a state, with their slots."""
    for slot, leaf in leaves(state):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
            yield slot, leaf
