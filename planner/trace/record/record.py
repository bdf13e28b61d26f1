"""What ran: calls of ops on fake tensors, and what went in and came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardwright.planner.contract.plain_values import PlainValue
from shardwright.planner.graph.marks import Draw
from shardwright.planner.trace.data_queries.conditional_regions import Region


@dataclass(frozen=True)
class Untraced:
    """Stands for the op of a call of a whole module."""

    _opname: str


@dataclass(frozen=True)
class Call:
    """One call of an op. The tensors in it are fake; they are told apart by identity."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    module: str
    source: str
    traced_call: int
    """Number of that which it was made in."""


class Passed(NamedTuple):
    """A tensor that is not floating, and the marker of a module that it entered or left.

    `behind` says how many calls were made before.
    """

    tensor: torch.Tensor
    tag: str
    behind: int


@dataclass
class Record:
    """What ran: the calls in order, and the tensors that went in and came out."""

    calls: list[Call]
    passed: list[Passed] = field(default_factory=list)
    """What entered and left modules, of tensors that are not floating, in order."""

    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters and buffers by name; those with several names are a tensor under each."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    wide: list[torch.Tensor] = field(default_factory=list)
    """What came in whose last dim is the model's."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    """What was returned, after the new values of inputs that were changed in place."""

    flags: dict[str, dict[str, list[PlainValue]]] = field(default_factory=dict)
    """Of each module that was called, its flags: the values that they had."""

    given: list[list[str]] = field(default_factory=list)
    """Of each run, the slots of the tensors that it returned."""

    states: list[dict[str, str]] = field(default_factory=list)
    """Of each run, the classes of the state that it was given, by argument."""

    taken: list[list[str]] = field(default_factory=list)
    """Of each run, the arguments that were its state."""

    resumed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Tensors in such a state, or in attributes, before a run, and what stood there after it."""

    left: bool = False
    """Whether attributes of modules were left otherwise than they were."""

    kept: bool = False
    """Whether code goes on with what a run before it left there."""

    written: dict[str, torch.Tensor] = field(default_factory=dict)
    """New values of parameters and buffers that were changed in place, by name."""

    drawn: list[tuple[torch.Tensor, Draw]] = field(default_factory=list)
    """Tensors for whose elements random numbers are drawn, and where."""

    draws: bool = False
    """Whether they are in eval mode, too."""

    own_gradients: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    """Tensors whose gradient code computes with: all of it, or a term of it at least."""

    read: list[torch.Tensor] = field(default_factory=list)
    """Tensors that numbers were read off."""

    cut: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Tensors, and a dim of each that is as long as data says."""

    overwritten: list[torch.Tensor] = field(default_factory=list)
    """What tensors were before code changed them in place."""

    changed: list[tuple[torch.Tensor, torch.Tensor, str]] = field(default_factory=list)
    """What modules were given and changed in place: before and after, and which."""

    replaced: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What they are after that, and before; not those that are parts of others."""

    regions: list[Region] = field(default_factory=list)
    """Loops that may make fewer passes than they did, and what code may skip."""

    changed_in_regions: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What those changed in place, before and after each change."""

    scores: list[torch.Tensor] = field(default_factory=list)
    """What of them runs of the root returned."""
