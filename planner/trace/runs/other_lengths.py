"""A call with other lengths than the plain one, for code that decides by lengths.

Code that pads to chunks of 256 does something else with 512 tokens than with 500. With a call of
either length in the trace, a plan holds for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from shardwright.planner.contract.length_comparisons import holds, numbers_in, sizes_in
from shardwright.planner.graph.trace_sizes import TRACE_SEQ
from shardwright.planner.trace.model.argument_trees import tree_leaves, tree_map
from shardwright.planner.trace.model.source import Source, named_inputs
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.training_runs import in_training
from shardwright.planner.trace.runs.trials import Trial, Trials

LONGEST = 8192
"""Tokens of a call that is traced; code with a loop over tokens runs as often."""


def with_other_lengths(source: Source, comparisons: Iterable[str]) -> Source | None:
    """Return the source with calls for which comparisons come out otherwise; None without any.

    Args:
        source: A traced source.
        comparisons: Comparisons with one length that held in its calls (`x.shape[1] > 10`).
    """
    if source.by_value or source.keeps:
        return None
    plain = [*filter(_is_plain, source.further), source.runs[0]]
    there = [*map(_shapes, plain)]
    calls = []
    for length, other in _lengths(source, {*comparisons}):
        fullest = next((r for r in plain if any(length in s for s in _shapes(r))), plain[-1])
        call = _resized(fullest, length, other)
        if _shapes(call) not in there:
            calls.append(call)
    if calls:  # an image of 5 pixels may be too small: nothing is traced again for it
        attempt = Trials(source.module).attempt
        calls = [call for call in calls if attempt(call) is not Trial.FAILS]
    if not calls:
        return None
    trained = in_training(calls) if any(run.training for run in source.further) else []
    return replace(source, further=(*source.further, *calls, *trained))


def _is_plain(run: Run) -> bool:
    return not (run.module or run.resumes or run.fills or run.training)


def _shapes(run: Run) -> list[torch.Size]:
    return [x.shape for x in tree_leaves((run.args, run.kwargs)) if isinstance(x, torch.Tensor)]


def _lengths(source: Source, comparisons: set[str]) -> Iterator[tuple[int, int]]:
    """Yield pairs of a traced length and another one for which a comparison comes out otherwise."""
    inputs = named_inputs(source.module, source.args, source.kwargs) or {}
    traced = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    seen = set()
    for text in sorted(comparisons):
        named = {*sizes_in(text)}
        if len(named) != 1:
            continue
        (name, dim) = named.pop()
        if name not in traced or traced[name].dim() <= dim:
            continue
        stated = sorted(n for n in numbers_in(text) if n > 1)
        # Multiples of a prime are told from sizes of the model.
        near = (n + k for k in (1, 0, -1) for n in stated)
        tried = [*(n * TRACE_SEQ for n in stated), *near]
        at, now = f"{name}.shape[{dim}]", traced[name].shape[dim]
        other = (n for n in tried if 1 < n <= LONGEST and not holds(text, {at: n}))
        if now > 1 and (found := (now, next(other, 0))) not in seen and found[1]:
            seen.add(found)
            yield found


def _resized(run: Run, length: int, other: int) -> Run:
    """Return a run whose tensors have `other` as size of all dims of `length`."""

    def resized(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or length not in x.shape:
            return x
        shape = [other if n == length else n for n in x.shape]
        return torch.empty(shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)

    args, kwargs = tree_map(resized, (run.args, dict(run.kwargs)))
    return run._replace(args=args, kwargs=kwargs, priced=False)
