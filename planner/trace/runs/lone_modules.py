"""Calls of modules without a config that no call of the model reaches: projectors, mergers.

Their layers say how wide their inputs are (`searched_inputs.py`). If no inputs are found for a
module, those inside it are tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from shardwright.planner.contract.names import is_within, pattern
from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ
from shardwright.planner.trace.inputs.input_trial import arguments
from shardwright.planner.trace.inputs.searched_inputs import Search
from shardwright.planner.trace.model.input_values import moved
from shardwright.planner.trace.runs.run import Run

MIN_SHARE = 0.01
"""The share of all parameters that a module must have."""


def lone_runs(root: nn.Module, reached: Collection[str]) -> Iterator[Run]:
    """Yield calls of modules that have none of the modules `reached` in them, outer modules first.

    Modules in lists of blocks are left out.
    """
    least = MIN_SHARE * sum(p.numel() for p in root.parameters())
    done: list[str] = []
    for name, module in root.named_modules():
        within = root.get_submodule(name.rpartition(".")[0])
        if pattern(name) != name or isinstance(within, nn.MultiheadAttention):
            continue  # in blocks, or its weights are read by the module around it
        if any(is_within(name, n) for n in done) or any(is_within(n, name) for n in reached):
            continue
        if sum(p.numel() for p in module.parameters()) < least:
            continue
        for given in _inputs(module):
            done.append(name)
            yield Run(name, (), moved(given))


def _inputs(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield inputs with which a module runs: images if its layers say so, else sequences.

    Towers call projectors also with the places of all sequences in a row.
    """
    search = Search(module)
    if not (search.at.names and search.run()):
        return
    floats = {n: v for n, v in search.given.items() if _is_float(v)}
    images = {n for n, v in floats.items() if v.dim() > 3}
    found: list[dict[str, Any]] = []
    if not images or images - search.ended.fits:
        # No layer said the width of these images: the first layer's is taken.
        widths = {n: search.at.first_width or 1 for n in images}
        for rows in ((TRACE_BATCH, TRACE_SEQ), (TRACE_BATCH * TRACE_SEQ,)):
            new = {n: v.new_empty(*rows, widths.get(n, v.shape[-1])) for n, v in floats.items()}
            if search.tried(given := {**search.given, **new}).runs:
                found.append(given)
    yield from map(arguments, found or [search.given])


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
