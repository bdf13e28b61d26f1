"""Finds the mixtures of experts in a traced model, whose tokens may travel between ranks of `ep`.

A mixture is a module that is called with hidden states, the numbers of each token's experts and
their weights, and whose parameters have a row for each expert. Or it is called with hidden states
that lie by expert: as many for each, or with the number of each expert's. Whether its tokens may
travel is tested by numbers (`probe.py`). A model that routes its tokens in the module that also
holds the experts has no such boundary, and is not split over `ep`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from math import gcd, prod
from typing import NamedTuple

from torch import nn

from shardwright.planner.contract.names import is_within
from shardwright.planner.contract.plain_values import is_said, plain_value, same_value
from shardwright.planner.experts.outside import read_outside
from shardwright.planner.experts.probe import Mixture, fault, same_settings
from shardwright.planner.graph.graph import Graph, Tensor
from shardwright.planner.graph.views import is_view


class _Call(NamedTuple):
    """The first call of a module: its arguments and its outputs, with whether they are integers.

    `unsaid` are arguments that are no tensors, and that depend on data.
    """

    inputs: dict[str, tuple[Tensor, bool]]
    outputs: dict[str, Tensor]
    unsaid: Set[str]


@dataclass
class Mixtures:
    """The mixtures of a traced model.

    Attributes:
        found: Traced module -> its arguments and parameters.
        refused: Module that looks like one -> why its tokens stay.
    """

    found: dict[str, Mixture] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def find_mixtures(
    graph: Graph, root: nn.Module, tested: Callable[[str], Mixture | None] = lambda name: None
) -> Mixtures:
    """Return the mixtures among the traced modules, each tested by numbers.

    `tested` may return the mixture that a module built alike was found to be before.
    """
    out, calls = Mixtures(), _first_calls(graph)
    for name, call in calls.items():
        if any(is_within(name, around) for around in out.found):
            continue
        module = root.get_submodule(name)
        for mixture in _mixtures(module, call):
            why = _said(graph, name, module, mixture) or read_outside(graph, root, name, mixture)
            twins = (root.get_submodule(n) for n, found in out.found.items() if found == mixture)
            known = mixture == tested(name) or any(_same_computation(module, t) for t in twins)
            if why is None and not known:
                why = fault(module, mixture)
            if why is None:
                out.found[name] = mixture
                out.refused.pop(name, None)
                break
            out.refused.setdefault(name, why)
    return out


def _same_computation(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules compute the same of the same parameters, so that one test will do."""
    first, second = ([(n, p.shape) for n, p in m.named_parameters()] for m in (one, other))
    return first == second and same_settings(one, other)


def _said(graph: Graph, name: str, module: nn.Module, mixture: Mixture) -> str | None:
    """Return what a module is told besides tensors, if it is not left at the default."""
    defaults = {n: p.default for n, p in signature(module.forward).parameters.items()}
    told = {*graph.other_arguments.get(name, ())} - {mixture.counts}
    for flag, values in graph.flags.get(name, {}).items():
        default = defaults.get(flag, Parameter.empty)
        usual = [plain_value(default)] if is_said(default) else []
        if len(values) != 1 or not any(same_value(values[0], value) for value in usual):
            told.add(flag)
    return f"it is also called with '{min(told)}', which the test does not cover" if told else None


def marked(graph: Graph, mixtures: Mixtures) -> Graph:
    """Return a graph with marks for the parameters that are spread and the tokens that travel."""
    of_experts = {
        f"{module}.{name}": (first, mixture.count, mixture.columns)
        for module, mixture in mixtures.found.items()
        for name, first in mixture.parameters.items()
    }
    spread: dict[str, tuple[int, int, int]] = {}
    for use in graph.uses:
        if use.fqn in of_experts:
            spread |= dict.fromkeys((use.stored, use.used), of_experts[use.fqn])
    for op in graph.ops:
        if is_view(op.call) and (experts := spread.get(op.inputs[0])) is not None:
            alike = (n for n in op.outputs if graph.tensors[n].shape[:1] == experts[:1])
            spread |= dict.fromkeys(alike, experts)
    lying = {m for m, mixture in mixtures.found.items() if mixture.experts is None}
    travelling: set[tuple[str, tuple[int, int]]] = set()
    for boundary in filter(graph.priced, graph.crossed):
        mixture, told = mixtures.found.get(boundary.module), boundary.module not in lying
        if mixture is not None and boundary.side == "in" and boundary.slot == mixture.tokens:
            travelling.add((boundary.target, (told * mixture.chosen, mixture.count)))
        elif mixture is not None and boundary.side == "out" and not told:
            travelling.add((boundary.source, (0, 0)))
    of_ranks = {  # their dim of experts is one of tokens, too: tp must not shard it
        (name, 0)
        for use in graph.uses
        if use.fqn in of_experts and any(is_within(use.fqn, module) for module in lying)
        for name in (use.stored, use.used)
    }
    marks = replace(
        graph.marks,
        spread_experts={*spread.items()},
        travelling=travelling,
        fixed=graph.marks.fixed | of_ranks,
    )
    return replace(graph, marks=marks, mixtures=mixtures.found, unspread=mixtures.refused)


def _first_calls(graph: Graph) -> dict[str, _Call]:
    """Return the first call of each module."""
    out: dict[str, _Call] = {}
    for boundary in graph.crossed:
        unsaid = frozenset(graph.other_arguments.get(boundary.module, ()))
        call = out.setdefault(boundary.module, _Call({}, {}, unsaid))
        if boundary.side == "in":
            call.inputs.setdefault(boundary.slot, (graph.tensors[boundary.target], False))
        elif boundary.side == "out":
            call.outputs.setdefault(boundary.slot, graph.tensors[boundary.source])
    for _, passing in graph.passed:
        slot, name = passing.slot, passing.name
        if slot.side == "in" and name is not None and slot.module in out:
            out[slot.module].inputs.setdefault(slot.slot, (graph.tensors[name], True))
    return out


def _mixtures(module: nn.Module, call: _Call) -> Iterator[Mixture]:
    """Yield what a module may be as a mixture: its arguments, parameters and number of experts."""
    found = [*_routing(module, call)]
    yield from found
    yield from (replace(mixture, columns=2) for mixture in found if mixture.chosen > 1)
    stacks = {n: len(p) for n, p in module.named_parameters() if p.dim() > 1}
    floating = [slot for slot, (_, integers) in call.inputs.items() if not integers]
    if len({*stacks.values()}) == len(floating) == 1 and [*call.outputs] == [""]:
        yield from _lying(module, call, floating[0], stacks)


def _lying(
    module: nn.Module, call: _Call, tokens: str, stacks: dict[str, int]
) -> Iterator[Mixture]:
    """Yield a mixture whose tokens lie by expert: as many for each, or it is told how many."""
    shape, made = call.inputs[tokens][0].shape, call.outputs[""].shape
    count = min(stacks.values())
    integers = [slot for slot, (tensor, _) in call.inputs.items() if tensor.shape == (count,)]
    if count < 2 or len(shape) not in (2, 3):
        return
    for of in _with_vectors(module, stacks, {count}):
        lying = Mixture(tokens, None, None, count, 0, shape[-1], of, _attributes(module, {count}))
        if len(call.inputs) == 1 and not call.unsaid:
            if made == shape and shape[0] % count == 0 and (len(shape) == 2 or shape[0] == count):
                yield replace(lying, dims=len(shape))
        elif len(shape) == len(made) == 2 and shape[0] == made[0]:
            listed = len(call.inputs) == 1
            told = call.unsaid if listed else integers
            if len(told) == 1 and len(call.inputs) + len(call.unsaid) == 2:
                yield replace(
                    lying, chosen=1, counts=min(told), listed=listed,
                    given=None if made[1] == shape[1] else made[1],
                )  # fmt: skip


def _routing(module: nn.Module, call: _Call) -> Iterator[Mixture]:
    """Yield a mixture that is told each token's experts."""
    whole = [slot for slot, (_, integers) in call.inputs.items() if integers]
    if len(whole) != 1 or len(call.inputs) != 3 or [*call.outputs] != [""]:
        return
    (experts,) = whole
    chosen = call.inputs[experts][0].shape
    alike = [n for n, (t, whole) in call.inputs.items() if not whole and t.shape == chosen]
    others = call.inputs.keys() - {experts, *alike}
    if len(chosen) != 2 or len(alike) != 1 or len(others) != 1:
        return
    (tokens,) = others
    shape = call.inputs[tokens][0].shape
    if prod(shape[:-1]) != chosen[0] or call.outputs[""].shape != shape:
        return
    for count, stacks in _stacks(module):
        held = {count, *stacks.values()}
        for of in _with_vectors(module, stacks, held):
            yield Mixture(
                tokens, experts, alike[0], count, chosen[1], shape[-1], of,
                _attributes(module, held),
            )  # fmt: skip


def _stacks(module: nn.Module) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield possible numbers of experts, with how many of them have rows in each parameter.

    These are all of them or the first, with a row each; or all, with several rows each.
    """
    stacks = {n: p for n, p in module.named_parameters() if p.dim() > 1}
    rows = {n: len(p) for n, p in stacks.items()}
    few, most, common = (
        min(rows.values(), default=0),
        max(rows.values(), default=0),
        gcd(*rows.values()),
    )
    if most > 1 and few and {*rows.values()} == {few, most}:
        yield most, rows
    sizes = {v for each in module.modules() for v in vars(each).values() if type(v) is int}
    for count in sorted(n for n in sizes if 1 < n < common and common % n == 0):
        yield count, dict.fromkeys(rows, count)
    if few == most > 0:  # of the last experts no parameter has rows
        features = {n for p in stacks.values() for n in p.shape[1:]}
        for count in sorted(n for n in sizes - features if n > most):
            yield count, rows


def _with_vectors(
    module: nn.Module, stacks: dict[str, int], counts: Set[int]
) -> Iterator[dict[str, int]]:
    """Yield parameters with rows for experts: also with an element for each, and without these."""
    vectors = {n: len(p) for n, p in module.named_parameters() if p.dim() == 1}
    of = {n: size for n, size in vectors.items() if size in counts}
    yield from [stacks | of, stacks] if of else [stacks]


def _attributes(module: nn.Module, counts: Set[int]) -> dict[str, int]:
    """Return the integers of a module and of those within that are numbers of experts."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if type(value) is int and value in counts
    }
