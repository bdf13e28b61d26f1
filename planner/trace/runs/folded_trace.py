"""Trace a model with one block of each kind, or with all blocks if they cannot be folded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

from shardwright.errors import ModelError
from shardwright.planner.blocks.fold import Folding, Idle, Unfoldable, fold
from shardwright.planner.blocks.stacks import (
    Stack,
    find_stacks,
    holders,
    shared_beyond,
    shortened,
)
from shardwright.planner.blocks.unfold import Unfolded, unfold
from shardwright.planner.contract.names import first_block, pattern
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.pins import Pin, matches
from shardwright.planner.trace.model.quantized_parameters import mark_quantized
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.queries.questions import noted
from shardwright.planner.trace.runs.compared_runs import (
    free_numbers,
    note_training,
    same_under_autocast,
)
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.trace_runs import trace_runs
from shardwright.planner.trace.runs.training_runs import in_training, no_python_random
from shardwright.planner.trace.trace_lock import alone

Traced = tuple[Source, Folding, Unfolded]


def trace_all(
    source: Source, pins: Sequence[Pin] = (), ends: bool = False, folds: bool = True
) -> Traced:
    """Trace a source with as many of its runs as possible.

    Returns the source with the runs that were traced, and the result of `trace_folded`. If code
    does something else in training mode, runs in training mode are traced too, unless that makes
    more modules opaque. `folds` says whether blocks may be folded.

    Raises:
        ModelError: the first run cannot be traced.
    """
    unfoldable = set[str]()

    def tried(of: Source, more: int, further: Sequence[Run], whole: bool) -> Traced:
        of = replace(of, more=of.more[:more], further=tuple(further))
        return of, *trace_folded(of, pins, ends, whole, folds, unfoldable)

    def keeps(of: Source, training: bool = False) -> bool:
        """Return whether code reads attributes that another call left."""
        of = replace(of, keeps=True)
        further = _and_in_training(replace(of, more=(), further=())) if training else ()
        return tried(of, 0, further, True)[1].graph.kept

    best = _in_eval_mode(source, partial(tried, source))
    if best[1].graph.left and keeps(source):
        source = replace(source, keeps=True)
        found, folding, _ = best
        try:  # with the runs that could be traced before
            best = tried(source, len(found.more), found.further, not folding.stacks)
        except (ModelError, Unfoldable):
            best = _in_eval_mode(source, partial(tried, source))
    graph, folded = best[1].graph, bool(best[1].stacks)
    if graph.trained:
        return best
    for whole in (False, True) if folded and source.trains else (not folded,):
        with suppress(ModelError, Unfoldable):
            with alone(), no_python_random():
                found = tried(*_with_training(source, best[0]), whole)
                if found[1].graph.left and not source.keeps and keeps(source, True):
                    kept = (replace(of, keeps=True) for of in (source, best[0]))
                    found = tried(*_with_training(*kept), whole)
            if {*map(pattern, found[1].graph.untraced)} <= {*map(pattern, graph.untraced)}:
                return found
    return best


def _with_training(source: Source, best: Source) -> tuple[Source, int, tuple[Run, ...]]:
    """Return the arguments of `tried`: `source` with the runs of `best`, also in training mode."""
    return source, len(best.more), _and_in_training(best)


def _and_in_training(source: Source) -> tuple[Run, ...]:
    """Return the further runs, all runs in training mode, and then the `again` runs once more."""
    again = (run for run in source.runs if run.again)
    return (*source.further, *in_training(source.runs), *again)


def _in_eval_mode(source: Source, tried: Callable[[int, Sequence[Run], bool], Traced]) -> Traced:
    """Do the same as `trace_all`, without training mode.

    `tried` traces the given number of `source.more`, and further runs.

    Raises:
        ModelError: the first run cannot be traced.
    """
    whole = False
    try:
        return tried(len(source.more), source.further, False)
    except Unfoldable:
        pass
    except ModelError:
        whole = True  # it failed with all blocks as well
    best = tried(0, (), True)
    for count in range(len(source.more), 0, -1):
        with suppress(ModelError):
            best = tried(count, (), True)
            break
    more = len(best[0].more)
    again = whole and more == len(source.more)
    if source.further and not best[1].stacks and not again:
        with suppress(ModelError):
            return tried(more, source.further, True)
    for wish in source.wishes:
        folded = bool(best[1].stacks)
        # Masks are too common to leave out: for these all blocks may be traced.
        ways = (False, True) if folded and wish is source.wishes[0] else (not folded,)
        for way, run in product(ways, wish):
            with suppress(ModelError, Unfoldable):
                best = tried(more, (*best[0].further, run), way)
                break
    return best


def trace_folded(
    source: Source,
    pins: Sequence[Pin] = (),
    ends: bool = False,
    whole: bool = True,
    folds: bool = True,
    unfoldable: set[str] | None = None,
) -> tuple[Folding, Unfolded]:
    """Return the folded graph of a model, and the unfolded one.

    Args:
        source: The model.
        pins: Pins; blocks with different pins are not folded into one.
        ends: Whether the first and the last block of a stack are kinds of their own.
        whole: Whether to trace all blocks if they cannot be folded.
        folds: Whether to fold blocks at all.
        unfoldable: Paths of stacks that are not folded; those that the plain call alone shows not
            to be foldable are added.

    Raises:
        ModelError: the model cannot be traced.
        Unfoldable: stacks cannot be folded, and `whole` is not set.
    """
    module, owners = source.module, holders(source.module)

    def label(name: str) -> tuple[object, ...]:
        pinned = tuple(p for p in pins if matches(p.name, name))
        again = first_block(name, source.recomputed)
        return *pinned, source.quantized.get(name), bool(again)

    labels = label if pins or source.quantized or source.recomputed else None

    known = set[str]() if unfoldable is None else unfoldable
    left_out, ways = set(known), () if not folds else (True,) if ends else (False, True)
    while ways:
        culprits: frozenset[str] = frozenset()
        for apart in ways:
            found = find_stacks(module, apart, labels, owners)
            stacks = [stack for stack in found if stack.path not in left_out]
            if not stacks:
                continue
            try:
                folding = _folded(source, stacks, owners)
                return folding, unfold(folding)
            except Unfoldable as error:
                culprits = error.stacks  # next with the end blocks apart, or without these stacks
            except ModelError:
                culprits = (
                    frozenset()
                )  # the code needs all blocks, or the model cannot be traced at all
                break
        if not culprits:
            break
        left_out |= culprits
        if len(source.runs) == 1:
            known |= culprits
    if not whole and folds and find_stacks(module, False, labels, owners):
        raise Unfoldable("only the whole model can be traced with these calls")
    folding = Folding(traced(source))
    return folding, unfold(folding)


def _folded(source: Source, stacks: Sequence[Stack], owners: Mapping[int, list[str]]) -> Folding:
    """Trace a model shortened to one block of each kind of `stacks`, and fold its graph.

    Raises:
        ModelError: the model cannot be traced so.
        Unfoldable: blocks differ.
    """
    with shortened(source.module, stacks):
        graph, shared = traced(source), shared_beyond(source.module, stacks, owners)
        try:
            return fold(graph, stacks, shared)
        except Idle:
            if not any(answers for _, answers in graph.branch_paths):
                raise
            return fold(traced(source, skips=True), stacks, shared)


def traced(source: Source, skips: bool = False) -> Graph:
    """Return the graph of all runs of a source; `skips` is as for `trace_runs`.

    Raises:
        ModelError: the model cannot be traced.
    """
    with alone(), noted() as asked:
        graph = trace_runs(source.module, source.runs, skips)
    graph.asks_autocast = asked.autocast and not same_under_autocast(graph, source, skips)
    mark_quantized(graph, source.quantized)
    note_training(graph, source, asked)
    graph.numbers = free_numbers(graph, source)
    return graph
