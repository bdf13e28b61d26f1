"""Tries calls of a model on meta, with one block of each kind or, if that fails, with all blocks.

That a call fails is found quickly, as most of those tried do: where calls have ended at the same
place with all blocks, all blocks are not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cached_property
from typing import TypeVar

from torch import nn

from shardwright.planner.blocks.stacks import Stack, find_stacks, shortened
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
        self.root = root
        self._alike: set[Lines] = set()
        """Places where calls end with all blocks as well."""
        self._failing: set[int] = set()
        """The ids of `kwargs` of runs that fail by themselves."""

    @cached_property
    def stacks(self) -> list[Stack]:
        """The stacks of blocks of `root`."""
        return find_stacks(self.root)

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

    def left(self, wishes: Sequence[tuple[Run, ...]]) -> list[tuple[Run, ...]]:
        """Return lists of alternative runs without those that were found to fail by themselves."""
        failing = self._failing
        kept = (tuple(run for run in wish if id(run.kwargs) not in failing) for wish in wishes)
        return [wish for wish in kept if wish]

    def without_refused(self, wish: tuple[Run, ...]) -> tuple[Run, ...]:
        """Return alternative runs without the first one, which was refused, and those like it.

        These have the same arguments, and fail too. Whether one fails that goes on from the state
        of other runs takes as long to find out as tracing them.
        """
        refused, rest = wish[0], wish
        while rest and rest[0].kwargs.keys() == refused.kwargs.keys() and self._fails(rest[0]):
            rest = rest[1:]
        return rest[1:] if rest and rest[0] is refused else rest

    def _fails(self, run: Run) -> bool:
        fails = not run.resumes and self.attempt(run) is Trial.FAILS
        self._failing |= {id(run.kwargs)} if fails else set()
        return fails

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
