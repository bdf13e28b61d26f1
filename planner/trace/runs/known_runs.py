"""What one set of runs shows for others: what was refused, what differs, what cannot be folded.

A model is traced with several sets of its runs until one can be traced. Most of what fails or
differs with some runs does so with more runs too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import ModelError
from shardwright.planner.trace.runs.run import Run


@dataclass
class Known:
    """What is known of a model from sets of runs that were traced.

    Attributes:
        folds: Whether blocks may be folded; not if the plain call alone folds none.
        valued: Whether there is another source, with values of the inputs, for code that depends on
            data.
        unfoldable: Sets of runs, and the paths of stacks that they show not to be foldable.
        differing: Sets of runs that compute something else in training mode.
        refused: Runs -> why they cannot be traced.
    """

    folds: bool = True
    valued: bool = False
    unfoldable: list[tuple[Sequence[Run], Collection[str]]] = field(default_factory=list)
    differing: list[Sequence[Run]] = field(default_factory=list)
    refused: dict[Any, ModelError] = field(default_factory=dict)

    def differs(self, runs: Sequence[Run]) -> bool:
        """Return whether some of these runs are known to be different in training mode."""
        return any(_within(some, runs) for some in self.differing)

    def left_out(self, runs: Sequence[Run]) -> set[str]:
        """Return the paths of stacks that cannot be folded, as some of these runs show."""
        return {path for some, paths in self.unfoldable if _within(some, runs) for path in paths}

    @contextmanager
    def refusing(self, runs: Sequence[Run]) -> Iterator[None]:
        """Context manager that notes why runs are refused, and refuses them when it knows."""
        if (known := self.refused.get(_keys(runs))) is not None:
            raise known
        try:
            yield
        except ModelError as error:
            self.refuse(runs, error)
            raise

    def refuse(self, runs: Sequence[Run], error: ModelError) -> None:
        """Note why runs are refused."""
        self.refused[_keys(runs)] = error


def _within(some: Sequence[Run], runs: Sequence[Run]) -> bool:
    return {*_keys(some)} <= {*_keys(runs)}


def _keys(runs: Sequence[Run]) -> tuple[Any, ...]:
    """Return one key for each run; runs of a source are made of the same arguments each time."""
    return tuple(
        (run.module, id(run.args), id(run.kwargs), run.training, run.again) for run in runs
    )
