"""Trace a model into the graph of its calls.

The steps, in order:

1. `model/`: `read_source` builds or copies the model on the meta device, without weights.
2. `runs/`: the calls that the plan must hold for are chosen: the plain call, calls with masks,
   labels and caches, decoding steps, training mode, towers that the plain call does not use.
   Example inputs are made if the user gives none (`inputs/`).
3. `record/`: the model's own code runs once for each call, on fake tensors. Each ATen call and
   each module boundary is recorded. `torch_features/` has what make_fx would not show as plain
   ops: flex_attention, cond, scripted functions.
4. During the run, queries of the code are answered and noted: `queries/` (training mode, gradients,
   autocast, flags), `data_queries/` (values of tensors), `sizes/` (integers and what they are
   computed from), `state/` (what modules keep between calls). A module that cannot be traced
   becomes one op: `opaque/`.
5. `to_graph/`: the record becomes the planner's graph, with facts about its tensors.
6. `folded_trace.py`: steps 3 to 5 run on a model with one block of each kind, which represents
   all blocks of that kind. `compared_runs.py` repeats them in other contexts, and compares.

`trial/` serves the dry run of a plan: it runs the split model on fake tensors and compares it with
the unsharded model.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.errors import ModelError
from shardwright.planner.trace.folded_trace import (
    Numbered,
    Traced,
    trace_all,
    trace_folded,
)
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.record.identity import checked
from shardwright.planner.trace.runs.known_runs import Known
from shardwright.planner.trace.runs.run import Run


def trace_model(
    source: Source, folds: bool = True, numbered: Numbered = lambda found: False
) -> Traced:
    """Trace the result of `read_source`: steps 2 to 6. The arguments are those of `trace_all`.

    A model that cannot be traced without data is traced again with the values of the integers and
    masks among its example inputs, and if need be of all of them. The plan then holds for what the
    code does with these values.

    Raises:
        ModelError: the model cannot be traced.
    """
    with checked(source.module):
        return _traced(source, folds, numbered)


def _traced(source: Source, folds: bool, numbered: Numbered) -> Traced:
    try:
        found = trace_all(source, folds, bool(source.valued), numbered)
    except ModelError as refused:
        found = _with_values(source, folds, refused, numbered)
    for run in found.source.missing:
        alone = replace(found.source, more=(), further=(run,))
        try:
            trace_folded(alone, known=Known(folds))
        except ModelError as error:
            raise ModelError(f"{_in_words(run)}: {error}") from error
        raise ModelError(
            f"{_in_words(run)} of {alone.architecture} cannot be traced with its other calls: "
            "plan without it"
        )
    return found


def _in_words(run: Run) -> str:
    return "continuous batching" if run.batched else f"the call with {', '.join(run.kwargs)}"


def _with_values(source: Source, folds: bool, refused: ModelError, numbered: Numbered) -> Traced:
    """Trace a source with values of its inputs: with those with which most is traced.

    Raises:
        ModelError: it cannot be traced with values either.
    """
    best: Traced | None = None
    for valued in source.with_values():
        try:
            found = trace_all(valued, folds, numbered=numbered)
        except ModelError as error:
            refused = error
            continue
        if best is None or len(found.graph.untraced) < len(best.graph.untraced):
            best = found
        if not best.graph.untraced:
            break
    if best is None:
        raise refused
    return best
