"""Example inputs that are searched for: each trial on meta says what to change.

A call begins with the arguments that must be given. A layer that takes an argument says its width
and its dims. Otherwise one argument after the other is changed or added, and a change is kept if
the code gets further with it. A call that runs is the plain one, with what else it can use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from shardwright.planner.graph.trace_sizes import TRACE_SEQ, TRACE_STEP
from shardwright.planner.trace.inputs.denoiser_arguments import Option, options, sides
from shardwright.planner.trace.inputs.input_trial import Ended, Given, arguments, tried
from shardwright.planner.trace.inputs.subject import Subject

MAX_TRIALS = 64
"""Trials of one model at most."""

LIKELY = 2
"""Options of an argument that are tried if the model runs without it."""


class Search:
    """A search for inputs of a model.

    Attributes:
        unknown: Arguments that must be given, and whose names do not say what they are.
        given: The inputs that got furthest.
        ended: How their trial ended.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.at = module, Subject(module)
        self.left = MAX_TRIALS
        self.known: dict[str, list[Option]] = {n: options(self.at, n) for n in self.at.names}
        self.unknown = [name for name in self.at.needed if not self.known[name]]
        self.given: dict[str, Any] = {}
        for name in [*dict.fromkeys((*list(self.at.names)[:1], *self.at.needed))]:
            self.given |= dict(self.known[name][0]) if self.known[name] else {}
        self.ended = self.tried(self.given)

    def calls(self) -> list[dict[str, Any]]:
        """Return the inputs of the plain call, then of further ones."""
        full = self._fuller()
        further = [] if full.keys() == self.given.keys() else [self.given]
        return [*map(arguments, (full, *further, *self._of_other_sizes()))]

    def run(self) -> bool:
        """Search until the code runs; returns whether it does."""
        while not self.ended.runs:
            if self.unknown:
                return False
            if not self._improved():
                return False
        return True

    def _fuller(self) -> dict[str, Any]:
        """Return the inputs with all further arguments that the code uses and runs with."""
        best, ended = dict(self.given), self.ended
        given = {name.partition(".")[0] for name in best}
        for name, param in self.at.names.items():
            if name in given or param.default is not None:
                continue
            for option in self.known[name][:LIKELY]:
                now, then = self._fitted({**best, **option})
                empty = all(value is None for value in option.values())
                if then.runs and (empty or then.steps != ended.steps):
                    best, ended = now, then
                    break
        return best

    def _of_other_sizes(self) -> Iterator[dict[str, Any]]:
        """Yield calls with twice the height or width of latents, if the code then does otherwise.

        Code may use a table for the size of the config, and compute it for others.
        """
        name = next(iter(self.at.names))
        given, latents, before = self.given, self.given[name], self.ended
        if latents.dim() < 4 or tuple(latents.shape[-2:]) != sides(self.at):
            return
        for dim in (-2, -1):
            shape = list(latents.shape)
            shape[dim] *= 2
            other = {**given, name: latents.new_empty(shape)}
            ended = self.tried(other)
            if ended.runs and ended.steps != before.steps:
                yield other

    def tried(self, given: Given) -> Ended:
        """Return how a call with these inputs ends."""
        self.left -= 1
        return tried(self.module, given)

    def _fitted(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], Ended]:
        """Try inputs, and again with what layers want of them for as long as they say something."""
        now, ended = dict(given), self.tried(given)
        while ended.wants and self.left > 0:
            name, wanted = next(iter(ended.wants.items()))
            changed = _as_wanted(now[name], wanted)
            if changed is None or changed.shape == now[name].shape:
                break
            now[name] = changed
            ended = self.tried(now)
        return now, ended

    def _improved(self) -> bool:
        """Take the first change with which the code gets further; returns whether there is one."""
        for change in chain([{}], self._widths(), self._changes()):
            if self.left <= 0:
                return False
            now, ended = self._fitted({**self.given, **change})
            if ended.runs or self._is_further(ended):
                self.given, self.ended = now, ended
                return True
        return False

    def _changes(self) -> Iterator[dict[str, Any]]:
        """Yield changes of one argument: those that the error names first, then missing ones."""
        given = {name.partition(".")[0] for name in self.given}
        every = [name for name in self.at.names if self.known[name]]
        named = [name for name in every if name in self.ended.error]
        missing = [name for name in every if name not in given and name not in named]
        there = [name for name in every if name in given and name not in named]
        for name in (*named, *missing, *there[::-1]):
            for option in self.known[name]:
                yield self._without(name, option)

    def _is_further(self, ended: Ended) -> bool:
        """Return whether a trial got further: not to the same error at the same line."""
        same = (ended.error, ended.where) == (self.ended.error, self.ended.where)
        return not same and len(ended.steps) > len(self.ended.steps)

    def _widths(self) -> Iterator[dict[str, Any]]:
        """Yield changes of a size to what the last layer wants, of arguments that no layer took.

        The layer may take an argument as it is, or with others in a row.
        """
        if self.ended.widths is None:
            return
        wanted, got = self.ended.widths
        for name, value in self.given.items():
            if isinstance(value, Tensor) and value.dim() > 1 and name not in self.ended.fits:
                for size in (wanted, value.shape[-1] + wanted - got):
                    if size > 0:
                        yield {name: value.new_empty((*value.shape[:-1], size))}
                for dim in range(1, value.dim() - 1):
                    yield {
                        name: value.new_empty((*value.shape[:dim], wanted, *value.shape[dim + 1 :]))
                    }

    def _without(self, name: str, option: Option) -> dict[str, Any]:
        """Return a change to `option`, which takes the place of other entries of the same dict."""
        old = {n: _GONE for n in self.given if n.startswith(f"{name}.") and n not in option}
        return {**old, **option}


_GONE = None
"""In place of an entry of a dict that another option has."""


def _as_wanted(value: Any, wanted: tuple[int | None, ...]) -> Tensor | None:
    """Return a tensor of the wanted shape; sizes that may be any are kept from the last dims on."""
    if not isinstance(value, Tensor):
        return None
    if len(wanted) == 1 and wanted[0] is not None:  # the width alone
        rows = value.shape[:-1] if 1 < value.dim() < 4 else (value.shape[0], TRACE_SEQ)
        return value.new_empty((*rows, wanted[0]))
    old = [1] * len(wanted) + list(value.shape)
    shape = [old[i - len(wanted)] if n is None else n for i, n in enumerate(wanted)]
    shape[0] = value.shape[0]
    if len(wanted) > value.dim():  # a video: frames lie behind the channels
        shape[2 : len(shape) - 2] = [TRACE_STEP] * (len(shape) - 4)
    return value.new_empty(shape)
