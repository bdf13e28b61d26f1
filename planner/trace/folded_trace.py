"""Trace a model with one block of each kind, or with all blocks if they cannot be folded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

from shardwright.errors import ModelError
from shardwright.planner.blocks.fold import Folding, Idle, Unfoldable, Unused, fold
from shardwright.planner.blocks.stacks import Stack, find_stacks, holders, shared_beyond, shortened
from shardwright.planner.blocks.unfold import Unfolded, check_unpriced, unfold
from shardwright.planner.contract.names import first_block, pattern
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.pins import matches
from shardwright.planner.trace.compared_runs import (
    free_numbers,
    note_training,
    same_for_all_draws,
    same_under_autocast,
)
from shardwright.planner.trace.data_queries.errors import DATA_DEPENDENT
from shardwright.planner.trace.model.quantized_parameters import mark_quantized
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.queries.questions import Asked, noted
from shardwright.planner.trace.runs.further_runs import Wish
from shardwright.planner.trace.runs.known_runs import Known
from shardwright.planner.trace.runs.run import NoCache, Run, RunRefused, needs_cache
from shardwright.planner.trace.runs.training_runs import in_training
from shardwright.planner.trace.runs.trials import Trials
from shardwright.planner.trace.trace_lock import alone
from shardwright.planner.trace.trace_runs import trace_runs

MAX_OPS_TO_TRACE_IN_TRAINING = 1000
"""Ops of a call that is traced in training mode, too, if the plan is not for training."""


class Traced(NamedTuple):
    """A source with the runs that were traced, the unfolded graph, and `Task.unmasked`."""

    source: Source
    unfolded: Unfolded
    unmasked: bool = False

    @property
    def folding(self) -> Folding:
        """The folded graph and its stacks."""
        return self.unfolded.folding

    @property
    def graph(self) -> Graph:
        """The folded graph."""
        return self.folding.graph


Numbered = Callable[[Traced], bool]
"""Whether code depends on the index of a block that was folded."""


def trace_all(
    source: Source,
    folds: bool = True,
    valued: bool = False,
    numbered: Numbered = lambda found: False,
) -> Traced:
    """Trace a source with as many of its runs as possible.

    If code does something else in training mode, runs in training mode are traced too, unless that
    makes more modules opaque.

    Args:
        source: The model and its runs.
        folds: Whether blocks may be folded.
        valued: Whether there is another source, with values, for code that depends on data.
        numbered: Asked where more runs must be traced: if so, they are traced with all blocks.

    Raises:
        ModelError: the first run cannot be traced.
    """
    known = Known(folds, valued, [((), source.told_apart)])

    def tried(of: Source, more: int, further: Sequence[Run], whole: bool) -> Traced:
        of = replace(of, more=of.more[:more], further=tuple(further))
        with known.refusing(of.runs):
            return trace_folded(of, whole, known)

    def keeps(of: Source, training: bool = False) -> bool:
        """Return whether code reads attributes that another call left."""
        of = replace(of, keeps=True)
        further = _and_in_training(replace(of, more=(), further=())) if training else ()
        return tried(of, 0, further, True).graph.reads_left_attributes

    trials = Trials(source.module)
    best = _in_eval_mode(source, partial(tried, source), trials)
    keep = best.graph.leaves_attributes and keeps(source)
    unfolds = bool(best.folding.stacks) and (keep or not best.graph.holds_in_training)
    if unfolds := unfolds and numbered(best):
        known.folds = False
    if keep or unfolds:
        source = replace(source, keeps=keep)
        before = best.source
        try:  # with the runs that could be traced before
            whole = unfolds or not best.folding.stacks
            best = tried(source, len(before.more), before.further, whole)
        except (ModelError, Unfoldable):
            best = _in_eval_mode(source, partial(tried, source), trials)
    graph, folded = best.graph, bool(best.folding.stacks)
    large = len(graph.ops) > MAX_OPS_TO_TRACE_IN_TRAINING * len(graph.branch_paths)
    if graph.holds_in_training or (large and not source.trains):
        return best
    for whole in (False, True) if folded and source.trains else (not folded,):
        with suppress(ModelError, Unfoldable):
            with alone():
                found = tried(*_with_training(source, best.source), whole)
                if found.graph.leaves_attributes and not source.keeps and keeps(source, True):
                    kept = (replace(of, keeps=True) for of in (source, best.source))
                    found = tried(*_with_training(*kept), whole)
            if {*map(pattern, found.graph.untraced)} <= {*map(pattern, graph.untraced)}:
                return found
    return best


def _with_training(source: Source, best: Source) -> tuple[Source, int, tuple[Run, ...]]:
    """Return the arguments of `tried`: `source` with the runs of `best`, also in training mode."""
    return source, len(best.more), _and_in_training(best)


def _and_in_training(source: Source) -> tuple[Run, ...]:
    """Return the further runs, all runs in training mode, and then the `again` runs once more."""
    again = (run for run in source.runs if run.again)
    return (*source.further, *in_training(source.runs), *again)


def _in_eval_mode(
    source: Source, tried: Callable[[int, Sequence[Run], bool], Traced], trials: Trials
) -> Traced:
    """Do the same as `trace_all`, without training mode.

    `tried` traces the given number of `source.more`, and further runs.

    Raises:
        ModelError: the first run cannot be traced.
    """
    whole, every = False, partial(tried, len(source.more))
    try:
        return _at_once(source.wishes, (), False, every, trials, first=True)
    except Unfoldable as error:
        if error.in_priced_runs:  # so would be the plain call alone
            with suppress(ModelError):
                return _at_once(source.wishes, (), True, every, trials, first=True)
    except ModelError:
        whole = True  # it failed with all blocks as well
    best = tried(0, (), True)
    for count in range(len(source.more), 0, -1):
        with suppress(ModelError):
            best = tried(count, (), True)
            break
    more = len(best.source.more)
    again = whole and more == len(source.more)
    if source.further and not best.folding.stacks and not again:
        with suppress(ModelError):
            return tried(more, source.further, True)
    for n, wish in enumerate(source.wishes):
        folded = bool(best.folding.stacks)
        if n == 1:
            with suppress(ModelError, Unfoldable):
                rest, before = source.wishes[1:], best.source.further
                return _at_once(rest, before, not folded, partial(tried, more), trials)
        # Masks are too common to leave out: for these all blocks may be traced.
        ways = (False, True) if folded and n == 0 else (not folded,)
        for way, run in product(ways, wish):
            with suppress(ModelError, Unfoldable):
                best = tried(more, (*best.source.further, run), way)
                break
    return best


def _at_once(
    wishes: Sequence[Wish],
    before: Sequence[Run],
    whole: bool,
    tried: Callable[[Sequence[Run], bool], Traced],
    trials: Trials,
    first: bool = False,
) -> Traced:
    """Trace wishes all at once, behind further runs, without the alternatives that are refused.

    Raises:
        ModelError, Unfoldable: it is not known which run is refused, or nothing is left of the
            first wish, and `first` says that it is needed.
    """
    left = trials.left(wishes)
    while True:
        try:
            return tried((*before, *(wish[0] for wish in left)), whole)
        except (ModelError, Unfoldable) as error:
            refused = error.__cause__ if isinstance(error, Unfoldable) else error
            if not isinstance(refused, RunRefused) or not 0 < refused.behind <= len(left):
                raise
            behind = refused.behind
            if isinstance(refused.__cause__, NoCache):
                left[-behind:] = _without_cache(left[-behind:])
            else:
                left[-behind] = trials.without_refused(left[-behind])
            if first and not left[0]:
                raise
            left = [wish for wish in left if wish]


def _without_cache(wishes: Sequence[Wish]) -> list[Wish]:
    """Return wishes less the steps that need a cache, up to a wish of which a call is left."""
    kept = [tuple(run for run in wish if not needs_cache(run)) for wish in wishes]
    n = next((n for n, wish in enumerate(kept) if wish), len(kept) - 1)
    return [*kept[: n + 1], *wishes[n + 1 :]]


def trace_folded(source: Source, whole: bool = True, known: Known | None = None) -> Traced:
    """Return the folded graph of a model, and the unfolded one.

    Args:
        source: The model.
        whole: Whether to trace all blocks if they cannot be folded.
        known: What is known from other sets of runs; what this one shows is added.

    Raises:
        ModelError: the model cannot be traced.
        Unfoldable: stacks cannot be folded, and `whole` is not set.
    """
    known = known or Known()
    module, owners = source.module, holders(source.module)

    def label(name: str) -> tuple[object, ...]:
        pinned = tuple(p for p in source.pins if matches(p.name, name))
        again = first_block(name, source.recomputed)
        return *pinned, source.quantized.get(name), bool(again)

    labels = label if source.pins or source.quantized or source.recomputed else None

    refused: ModelError | None = None
    foldable, left_out, plain = known.folds, known.left_out(source.runs), len(source.runs) == 1
    as_plain = left_out == known.left_out(source.runs[:1])
    apart: dict[str, int] = defaultdict(lambda: int(source.along))
    in_more_runs = set[str]()
    while foldable:
        found = find_stacks(module, apart.__getitem__, labels, owners)
        stacks = [stack for stack in found if stack.path not in left_out]
        if not stacks:
            break
        try:
            return Traced(source, unfold(_folded(source, stacks, owners, known)))
        except Unfoldable as error:
            as_plain = False
            in_more_runs |= set() if error.in_priced_runs else error.stacks
            out = set[str]()
            for path in error.stacks:
                # Next with the end blocks apart; then, as a tower of which the last block is not
                # used, with one more; then without this stack.
                if isinstance(error, Unused) or apart[path] > (path in error.afar):
                    out.add(path)
                apart[path] += 1
            left_out |= out
            known.unfoldable += (
                (source.runs, out & in_more_runs),
                (_priced(source), out - in_more_runs),
            )
        except ModelError as error:
            # What fails in the plain call, shortened alike, fails with that call alone as well.
            behind = error.behind if isinstance(error, RunRefused) else 0
            alone_too = plain or (as_plain and behind == len(source.runs))
            lacking = isinstance(error.__cause__, DATA_DEPENDENT) and alone_too and known.valued
            if lacking or isinstance(error.__cause__, ImportError):
                if alone_too:
                    known.refuse(source.runs[:1], error)
                raise  # so would all blocks
            known.folds &= not alone_too
            refused = error
            break  # the code needs all blocks, or cannot be traced at all
    known.folds &= not plain
    if not whole and foldable and (stacks := find_stacks(module, label=labels, owners=owners)):
        error = Unfoldable("only the whole model can be traced with these calls")
        left_out = known.left_out(_priced(source))
        error.in_priced_runs = not known.folds or all(stack.path in left_out for stack in stacks)
        raise error from refused
    return Traced(source, unfold(Folding(traced(source, known))))


def _priced(source: Source) -> list[Run]:
    return [run for run in source.runs if run.priced and not run.training]


def _folded(
    source: Source, stacks: Sequence[Stack], owners: Mapping[int, list[str]], known: Known
) -> Folding:
    """Trace a model shortened to one block of each kind of `stacks`, and fold its graph.

    Raises:
        ModelError: the model cannot be traced so.
        Unfoldable: blocks differ.
    """
    with shortened(source.module, stacks):
        shared, skips = shared_beyond(source.module, stacks, owners), False
        graph, asked = _asked(source, shortened=True)
        error = _unfoldable(graph, stacks, shared)  # before it is traced in other contexts
        if isinstance(error, Idle) and any(answers for _, answers in graph.branch_paths):
            skips = True
            graph, asked = _asked(source, skips, shortened=True)
        elif error is not None:
            error.in_priced_runs = _unfoldable(graph.priced_runs(), stacks, shared) is not None
            raise error
        _compare(graph, asked, source, skips, known)
    folding = fold(graph, stacks, shared)
    if skips:  # otherwise `_unfoldable` has checked it
        check_unpriced(folding)
    return folding


def _unfoldable(graph: Graph, stacks: Sequence[Stack], shared: frozenset[str]) -> Unfoldable | None:
    """Return why a graph cannot be folded, if it cannot; it stays as it is."""
    try:
        folding = fold(graph.copied_for_folding(), stacks, shared)
        check_unpriced(folding)
        unfold(folding, alike=3)
    except Unfoldable as error:
        return error
    return None


def traced(source: Source, known: Known | None = None) -> Graph:
    """Return the graph of all runs of a source; what it shows is added to `known`.

    Raises:
        ModelError: the model cannot be traced.
    """
    graph, asked = _asked(source)
    _compare(graph, asked, source, False, known or Known())
    return graph


def _asked(source: Source, skips: bool = False, shortened: bool = False) -> tuple[Graph, Asked]:
    """Return the graph of all runs of a source, and what code asked; the rest as in `trace_runs`.

    Raises:
        ModelError: the model cannot be traced.
    """
    trace = partial(trace_runs, source.module, source.runs, skips, shortened=shortened)
    with alone(), noted() as asked:
        return same_for_all_draws(source.architecture, trace), asked


def _compare(graph: Graph, asked: Asked, source: Source, skips: bool, known: Known) -> None:
    """Note in the graph of a source how it computes in other contexts."""
    graph.asks_autocast = asked.autocast and not same_under_autocast(graph, source, skips)
    mark_quantized(graph, source.quantized)
    if not known.differs(source.runs):
        note_training(graph, source, asked)
        known.differing += [] if graph.holds_in_training else [source.runs]
    graph.numbers = free_numbers(graph, source)
