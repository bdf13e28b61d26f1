"""The record of a trace: calls of ops on fake tensors, inputs, outputs and further facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardwright.planner.graph.graph import RunFacts
from shardwright.planner.graph.marks import Draw
from shardwright.planner.trace.data_queries.conditional_regions import Region


@dataclass(frozen=True)
class Untraced:
    """The op of a call of a module that is not traced."""

    _opname: str


@dataclass(frozen=True)
class Call:
    """One call of an op. Its tensors are fake and are compared by identity."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    module: str
    source: str
    traced_call: int
    """Number of the traced call that made it."""


class Passed(NamedTuple):
    """A tensor that is not floating, and the tag of the module boundary that it crossed.

    `behind` is the number of calls made before.
    """

    tensor: torch.Tensor
    tag: str
    behind: int


@dataclass
class Record(RunFacts):
    """The recorded calls in order, the input and output tensors, and further facts."""

    calls: list[Call]
    passed: list[Passed] = field(default_factory=list)
    """Tensors that are not floating and crossed a module boundary, in order."""

    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters and buffers by name. A tied parameter has a separate tensor under each name."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    wide: list[torch.Tensor] = field(default_factory=list)
    """Floating inputs of unpriced runs; their last dim is a size of the model."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    """Returned tensors, after the new values of inputs that were changed in place."""

    resumed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Tensors in a cache or in attributes before a run, and the tensors there after it."""

    stateful: set[str] = field(default_factory=set)
    """Modules that, called again with the same arguments, may do something else: they change
    buffers, attributes that their next call reads, or their arguments."""

    written: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """By name: new values of parameters and buffers, changed in place or set, at ends of runs."""

    assigned: set[str] = field(default_factory=set)
    """Parameters and buffers whose `data`, flags, gradient or hooks code has to do with."""

    drawn: list[tuple[torch.Tensor, Draw]] = field(default_factory=list)
    """Tensors for whose elements random numbers are drawn, and where they are drawn."""

    own_gradients: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    """Tensors whose gradient code computes with: the full gradient, or a partial one is enough."""

    read: list[torch.Tensor] = field(default_factory=list)
    """Tensors that code read numbers from."""

    seen: list[torch.Tensor] = field(default_factory=list)
    """Tensors of code that may do something else for other values of example inputs."""

    cut: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Tensors, each with a dim whose length depends on data."""

    by_reads: list[tuple[torch.Tensor, frozenset[tuple[int, int]]]] = field(default_factory=list)
    """Results of ops in functions that got sizes, with the reads of these."""

    overwritten: list[torch.Tensor] = field(default_factory=list)
    """Tensors before code changed them in place."""

    changed: list[tuple[torch.Tensor, torch.Tensor, str]] = field(default_factory=list)
    """Tensors that modules took and changed in place: before, after, name of the module."""

    replaced: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Tensors after and before an in-place change, without views of other tensors."""

    regions: list[Region] = field(default_factory=list)
    """Conditional regions: loops that may make fewer passes, and code that may be skipped."""

    changed_in_regions: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Tensors that the regions change, before and after each change."""

    scores: list[torch.Tensor] = field(default_factory=list)
    """The outputs that runs of the root returned."""
