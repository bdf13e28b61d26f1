"""Tries calls of a model on meta, with one block of each kind or, if that fails, with all blocks.

That a call fails is found quickly, as most of those tried do: where calls have ended at the same
place with all blocks, all blocks are not tried again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from torch import nn

from shardwright.planner.blocks.stacks import find_stacks, shortened
from shardwright.planner.trace.data_queries.errors import DATA_DEPENDENT
from shardwright.planner.trace.data_queries.model_code import Lines, lines_of
from shardwright.planner.trace.model.module_copies import duplicated
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.trial.fake_tensor_bridge import run_on_fake

T = TypeVar("T")


class Trial(Enum):
    """How a run on meta ends."""

    RUNS = "it runs"
    ON_DATA = "it depends on data"
    FAILS = "the code refuses the inputs, or is not for meta"


class Trials:
    """Tries calls of `root`, which must not change meanwhile."""

    def __init__(self, root: nn.Module) -> None:
        self.root, self.stacks = root, find_stacks(root)
        self._alike: set[Lines] = set()
        """Places where calls end with all blocks as well."""

    def attempt(self, run: Run) -> Trial:
        """Return how `run` ends."""
        opaque = Opaque(self.root)

        def call() -> None:
            with duplicated(self.root) as module:
                run_on_fake(module, [run], opaque)

        try:
            self.made(call)
        except DATA_DEPENDENT:
            return Trial.ON_DATA
        except Exception:  # the code may raise anything
            return Trial.FAILS
        return Trial.RUNS

    def made(self, call: Callable[[], T]) -> T:
        """Return what `call` makes with a copy of the model.

        Raises:
            Exception: it fails; if it then depends on data, that error.
        """
        try:
            with shortened(self.root, self.stacks):
                return call()
        except Exception as error:
            if not self.stacks or (place := lines_of(error)) in self._alike:
                raise
            shorter = error
        try:
            return call()
        except Exception as error:
            if lines_of(error) == place:
                self._alike.add(place)
            raise shorter if isinstance(shorter, DATA_DEPENDENT) else error from None
