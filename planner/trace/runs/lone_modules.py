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

LEAST = 0.01
"""The share of all parameters that a module must have."""


def lone_runs(root: nn.Module, reached: Collection[str]) -> Iterator[Run]:
    """Yield calls of modules that have none of the modules `reached` in them, outer modules first.

    Modules in lists of blocks are left out. Each is called with the places of all sequences in a row as well: towers call projectors so.
    """
    least = LEAST * sum(p.numel() for p in root.parameters())
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
    """Yield inputs with which a module runs: sequences, or images if it takes nothing else."""
    search = Search(module)
    if not (search.at.names and search.run()):
        return
    floats = {n: v for n, v in search.given.items() if _is_float(v)}
    images = {n for n, v in floats.items() if v.dim() > 3}
    found: list[dict[str, Any]] = []
    width = search.at.first_width or 1
    for rows in ((TRACE_BATCH, TRACE_SEQ), (TRACE_BATCH * TRACE_SEQ,)):
        sized = {n: v.new_empty(*rows, _width(v, n in images, width)) for n, v in floats.items()}
        given = {**search.given, **sized}
        if not (images and images <= search.ended.fits) and search.tried(given).runs:
            found.append(given)
    yield from map(arguments, found or [search.given])


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def _width(value: Tensor, unknown: bool, first: int) -> int:
    """Return the width of a sequence; that of the first layer, if no layer said it."""
    return first if unknown else value.shape[-1]
