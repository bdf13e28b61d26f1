"""Finds the mixtures of experts in a traced model, whose tokens may travel between ranks of `ep`.

A mixture is a module that is called with hidden states, the numbers of each token's experts and
their weights, and whose parameters have a row for each expert. Whether its tokens may travel is
tested by numbers (`probe.py`). A model that routes its tokens in the module that also holds the
experts has no such boundary, and is not split over `ep`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from torch import nn

from shardwright.planner.experts.probe import Mixture, fault
from shardwright.planner.graph.graph import Graph, Tensor
from shardwright.planner.graph.views import is_view


class _Call(NamedTuple):
    """The first call of a module: its arguments and its outputs, with whether they are integers."""

    inputs: dict[str, tuple[Tensor, bool]]
    outputs: dict[str, Tensor]


@dataclass
class Mixtures:
    """The mixtures of a traced model.

    Attributes:
        found: Traced module -> its arguments and parameters.
        refused: Module that looks like one -> why its tokens stay.
    """

    found: dict[str, Mixture] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def find_mixtures(graph: Graph, root: nn.Module) -> Mixtures:
    """Return the mixtures among the traced modules, each tested by numbers."""
    out, calls = Mixtures(), _first_calls(graph)
    owners = dict.fromkeys(use.fqn.rpartition(".")[0] for use in graph.uses if not use.is_buffer)
    for name in owners:
        module = root.get_submodule(name)
        mixture = _mixture(module, calls[name]) if name in calls else None
        if mixture is None:
            continue
        why = fault(module, mixture)
        if why is None:
            out.found[name] = mixture
        else:
            out.refused[name] = why
    return out


def mark(graph: Graph, mixtures: Mixtures) -> None:
    """Mark the parameters that are spread over ranks, and the tokens that travel."""
    stored: dict[str, str] = {}
    for use in graph.uses:
        owner, _, name = use.fqn.rpartition(".")
        if owner in mixtures.found and name in mixtures.found[owner].parameters:
            stored[use.used] = use.stored
    spread = {*stored, *stored.values()}
    for op in graph.ops:
        if is_view(op.call) and op.inputs[0] in spread:
            rows = graph.tensors[op.inputs[0]].shape[:1]
            spread |= {out for out in op.outputs if graph.tensors[out].shape[:1] == rows}
    graph.marks.spread_experts |= spread
    for boundary in graph.crossed:
        mixture = mixtures.found.get(boundary.module)
        if mixture is not None and graph.priced(boundary) and boundary.slot == mixture.tokens:
            graph.marks.travelling |= {(boundary.target, mixture.chosen)}
    graph.mixtures = dict(mixtures.found)


def _first_calls(graph: Graph) -> dict[str, _Call]:
    """Return the first call of each module."""
    out: dict[str, _Call] = {}
    for boundary in graph.crossed:
        call = out.setdefault(boundary.module, _Call({}, {}))
        if boundary.side == "in":
            call.inputs.setdefault(boundary.slot, (graph.tensors[boundary.target], False))
        elif boundary.side == "out":
            call.outputs.setdefault(boundary.slot, graph.tensors[boundary.source])
    for _, passing in graph.passed:
        slot, name = passing.slot, passing.name
        if slot.side == "in" and name is not None and slot.module in out:
            out[slot.module].inputs.setdefault(slot.slot, (graph.tensors[name], True))
    return out


def _mixture(module: nn.Module, call: _Call) -> Mixture | None:
    """Return a module's arguments and parameters, if it is called as a mixture is."""
    stacks = {n: p for n, p in module.named_parameters(recurse=False) if p.dim() > 1}
    rows = Counter(len(p) for p in stacks.values())
    whole = [slot for slot, (_, integers) in call.inputs.items() if integers]
    if len(rows) != 1 or len(whole) != 1 or len(call.inputs) != 3 or [*call.outputs] != [""]:
        return None
    (count,), (experts,) = rows, whole
    chosen = call.inputs[experts][0].shape
    alike = [n for n, (t, whole) in call.inputs.items() if not whole and t.shape == chosen]
    others = call.inputs.keys() - {experts, *alike}
    if count < 2 or len(chosen) != 2 or len(alike) != 1 or len(others) != 1:
        return None
    (tokens,) = others
    shape = call.inputs[tokens][0].shape
    if prod(shape[:-1]) != chosen[0] or call.outputs[""].shape != shape:
        return None
    return Mixture(
        tokens, experts, alike[0], count, chosen[1], shape[-1], tuple(stacks),
        tuple(_attributes(module, count)),
    )  # fmt: skip


def _attributes(module: nn.Module, count: int) -> Iterator[str]:
    """Yield the integers of a module and of those within that are the number of experts."""
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if type(value) is int and value == count:
                yield f"{path}.{name}".lstrip(".")
