"""Calls of the root with optional arguments and switches that turn on parts of a model.

A decoder may run only if the values that it is to predict are given, a second path only with its
flag. Such a call is worth more than one of the parts by themselves: the model's own code is in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwright.planner.contract.names import MASKS
from shardwright.planner.trace.inputs.argument_options import BESIDE, options
from shardwright.planner.trace.inputs.documented_shapes import documented
from shardwright.planner.trace.inputs.subject import Subject
from shardwright.planner.trace.model.input_values import moved
from shardwright.planner.trace.runs.decoding import EMBEDDED, GROWING, POSITIONS
from shardwright.planner.trace.runs.further_runs import SPANS
from shardwright.planner.trace.runs.run import Run

OF_OTHER_CALLS = {*MASKS, *BESIDE, *GROWING, *EMBEDDED, *SPANS, POSITIONS, "labels"}
"""Arguments of other further calls (`further_runs.py`)."""

MAX_TRIALS = 12
"""Calls that are tried at most."""


def optional_runs(root: nn.Module, plain: Run) -> Iterator[Run]:
    """Yield `plain` with more arguments: each switch that is off, then tensors that docs describe.

    Of the tensors all are given at once, then those whose names begin with the same word, as they
    may be needed together, then each by itself.
    """
    given = plain.kwargs
    for more in [*_switches(root, given), *_tensors(root, given)][:MAX_TRIALS]:
        yield plain._replace(kwargs={**given, **more})


def _switches(root: nn.Module, given: Mapping[str, Any]) -> Iterator[dict[str, bool]]:
    names = inspect.signature(root.forward).parameters
    yield from ({n: True} for n, p in names.items() if p.default is False and n not in given)


def _tensors(root: nn.Module, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    at = Subject(root)
    left_out = [n for n, p in at.names.items() if p.default is None and given.get(n) is None]
    said = [n for n in documented(at) if n in left_out and n not in OF_OTHER_CALLS]
    found = {name: moved(option) for name in said if (option := next(options(at, name), None))}
    words = dict.fromkeys(name.partition("_")[0] for name in found)
    groups = [[n for n in found if n.partition("_")[0] == word] for word in words]
    every = [[*found], *(group for group in groups if len(group) > 1), *([n] for n in found)]
    for names in dict.fromkeys(map(tuple, filter(None, every))):
        yield {key: value for name in names for key, value in found[name].items()}
