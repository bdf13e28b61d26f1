"""Finds the blocks of a model by the names of its modules, and the blocks around a module."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import combinations

from shardwright.planner.contract.names import is_within, prefixes


class ModelBlocks:
    """Blocks and parts of a model, by the names of its modules alone.

    A block is a module with a number as its name, in a stack with two similar modules: they share
    at least two submodules with parameters, and at least half of those in either. A part is a
    module with a parameter in it.

    Args:
        owners: The modules that have parameters of their own.
    """

    def __init__(self, owners: Iterable[str]) -> None:
        self.owners = frozenset(owners)
        self.parts = {prefix for name in self.owners for prefix in prefixes(name)}
        self.around, self.part = cache(self._around), cache(self._part)
        self.is_stack = cache(self._is_stack)

    def _around(self, module: str) -> tuple[str, ...]:
        """Return the model and the blocks around a module, outermost first, including itself."""
        return ("", *(p for p in prefixes(module) if p and self._is_block(p)))

    def _is_block(self, module: str) -> bool:
        stack, _, number = module.rpartition(".")
        return number.isdigit() and self.is_stack(stack)

    def _is_stack(self, stack: str) -> bool:
        inside: dict[str, set[str]] = {}
        for name in self.owners:
            if is_within(name, stack):
                number, _, rest = name[len(stack) :].removeprefix(".").partition(".")
                inside.setdefault(number, set()).add(rest)
        blocks = [names for number, names in inside.items() if number.isdigit()]
        shared = ((a & b, a | b) for a, b in combinations(blocks, 2))
        return any(len(both) > 1 and 2 * len(both) >= len(all_) for both, all_ in shared)

    def _part(self, module: str) -> str:
        """Return the innermost part that contains a module, which may be the module itself."""
        return next((p for p in reversed(prefixes(module)) if p in self.parts), "")
