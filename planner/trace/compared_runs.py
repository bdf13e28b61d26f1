"""Runs that are traced again in another context, and compared with the first trace.

If both compute the same, the plan also holds in that context: in training mode, under autocast, or
with other values of the numbers among the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial, wraps
from typing import Any, NamedTuple

from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.contract.plain_values import FREE, is_number
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.trace import python_draws
from shardwright.planner.trace.inputs.subject import floating_dtype
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.queries.flags import Flags, add_flags, free_flags
from shardwright.planner.trace.queries.opaque_ints import Shows, hidden
from shardwright.planner.trace.queries.questions import Asked, noted
from shardwright.planner.trace.record.boundaries import argument_names
from shardwright.planner.trace.record.wrapped_forwards import Forward, put_around
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.training_runs import changes_more, in_training
from shardwright.planner.trace.trace_lock import alone
from shardwright.planner.trace.trace_runs import trace_runs
from shardwright.rules.normalization import UPDATED
from shardwright.rules.registry import rule_for

CASTING = ("to", "_to_copy", "type_as")
"""Ops that cast."""

# What may differ between two graphs that compute the same.
NOT_COMPARED = ("ops", "marks", "holds_in_training", "unpriced", "draws", "flags", "places")
COMPARED = [f.name for f in fields(Graph) if f.name not in NOT_COMPARED]


def _graph_in(
    source: Source,
    context: AbstractContextManager[Any],
    runs: Sequence[Run] | None = None,
    skips: bool = False,
    settled: bool = False,
) -> Graph | None:
    """Return the graph of the runs in a context; None if they cannot be traced there."""
    try:
        trace = partial(trace_runs, source.module, runs or source.runs, skips, settled)
        with alone(), context:
            return same_for_all_draws(source.architecture, trace)
    except ModelError:
        return None


# --- training mode


def note_training(graph: Graph, source: Source, asked: Asked) -> None:
    """Set `graph.holds_in_training` if the runs of `source` compute the same in training mode.

    `asked` are the queries noted while `graph` was traced.
    """
    if any(run.training for run in source.runs):
        return
    if not (asked.training or graph.untraced or changes_more(source.module)):
        graph.holds_in_training = True
        return
    if any(op.call.op in UPDATED for op in graph.ops):
        return  # in training mode these are other ops
    on_data = graph.untraced or graph.skips or any(answers for _, answers in graph.branch_paths)
    settled = graph.stand_ins and not on_data  # what depends on data then is not the same
    again = in_training(source.runs)
    other = _graph_in(source, nullcontext(), again, settled=settled)
    if other is not None and _same(graph, other):
        graph.holds_in_training, graph.marks.drawn = True, other.marks.drawn
        add_flags(graph.flags, other.flags)


def same_for_all_draws(name: str, trace: Callable[[], Graph]) -> Graph:
    """Return what `trace` returns; several times, if its code draws numbers without torch.

    Args:
        name: The class of the model.
        trace: Traces runs of the model.

    Raises:
        ModelError: the graph is another one for other draws, which ranks would have, or it has a
            tensor of which it is not known what code made it of.
    """
    before = python_draws.states()
    with python_draws.noting_data() as data:
        graph = trace()
    for context in python_draws.other_draws() if python_draws.states() != before else ():
        with context, python_draws.noting_data() as again:
            other = trace()
        if not _same(graph, other) or data != again or len(graph.constants) > len(data):
            raise ModelError(f"cannot split {name}: {python_draws.REFUSED}")
    return graph


def _same(one: Graph, other: Graph) -> bool:
    """Return whether two fresh graphs are equal, apart from source lines and random draws."""
    ends = [
        (replace(g.marks, drawn=set()), [op._replace(source="") for op in g.ops])
        for g in (one, other)
    ]
    return ends[0] == ends[1] and all(getattr(one, n) == getattr(other, n) for n in COMPARED)


# --- autocast


def same_under_autocast(graph: Graph, source: Source, skips: bool) -> bool:
    """Return whether the runs of `source` compute the same under autocast, apart from casts.

    Code is told that autocast is on, with the dtype of its parameters: casts to that dtype have no
    effect.
    """
    other = _graph_in(source, noted(floating_dtype(source.module)), skips=skips)
    return other is not None and _computed(graph) == _computed(other)


def _computed(graph: Graph) -> list[Any]:
    """Return the ops without casts, in order, with each operand as the number of its producer."""
    crossed = (*graph.boundaries, *graph.crossed)
    alias = {b.target: b.source for b in crossed if b.target != b.source}
    alias |= {op.outputs[0]: op.inputs[0] for op in graph.ops if _is_cast(op)}
    made: dict[str, Any] = {}

    def of(name: str) -> Any:
        while name in alias:
            name = alias[name]
        return made.get(name, name)

    out: list[Any] = []
    for op in graph.ops:
        if not _is_cast(op):
            out.append((op.module, op.traced_call, op.call, [*map(of, op.inputs)]))
            made |= {name: (len(out), i) for i, name in enumerate(op.outputs)}
    return [*out, [*map(of, graph.outputs)]]


def _is_cast(op: Op) -> bool:
    call = op.call
    alike = call.operand_dtypes == call.result_dtypes and call.operands == call.results
    return call.op in CASTING and alike and len(op.inputs) == 1


# --- numbers among the arguments


OTHER_NUMBERS = ((29, 31), (7, 11), (2, 3))
"""Pairs of values for numbers. The first pair with which the runs can be traced is used."""


def free_numbers(graph: Graph, source: Source) -> frozenset[str]:
    """Return the number arguments in the runs of `source` for any of which the plan holds.

    They are made opaque: only torch may use them (see `opaque_ints.py`). `graph` is the graph of
    the source. Dims in which code takes parts at such numbers are marked in it as never sharded.
    """
    names = {n for run in source.runs if not run.module for n in _numbers(source.module, run)}
    found: set[str] = set()
    for group in ([names] if names else []) + [{n} for n in sorted(names) if len(names) > 1]:
        if not group <= found and (other := _at_any(group, graph, source)) is not None:
            found |= group
            graph.marks.data_sized |= other.cut
            graph.marks.fixed |= other.cut
            for module, free in free_flags(graph.flags, other.flags).items():
                graph.other_arguments.setdefault(module, set()).update(free)
    return frozenset(found)


def _numbers(module: nn.Module, run: Run) -> Iterator[str]:
    given = {**dict(zip(argument_names(module.forward), run.args, strict=False)), **run.kwargs}
    for name, value in given.items():
        if is_number(value) and name not in FREE:
            yield name


class _AtAny(NamedTuple):
    """Dims that are cut at opaque numbers, and the flags that modules got besides."""

    cut: set[tuple[str, int]]
    flags: Flags


def _at_any(names: Collection[str], graph: Graph, source: Source) -> _AtAny | None:
    """Return what runs do with these numbers; None if they may differ for other numbers."""
    calls = len(source.runs) * (100 + 20 * len(graph.ops))
    modes: list[Shows] = []

    def traced(sign: int, value: int | None = None) -> Graph | None:
        asked: list[Any] = []

        def shows() -> Shows:
            modes.append(Shows(asked, calls))
            return modes[-1]

        hiding = _hiding(source.module, sorted(names), sign, value, shows)
        found = _graph_in(source, hiding)
        return None if asked else found

    flags: Flags = {}
    for sign in (-1, 1):
        other = traced(sign)
        if other is None or _computed(other) != _computed(graph):
            return None
        flags = other.flags
    if not any(mode.general for mode in modes):
        return _AtAny(set(), flags)
    want = _ruled(graph)
    for pair in OTHER_NUMBERS:
        found = [traced(1, value) for value in pair]
        if all(found):
            if not all(one is not None and _ruled(one) == want for one in found):
                return None
            cut = found[0].marks.data_sized - graph.marks.data_sized  # type: ignore[union-attr]
            if any(_is_feature(graph, *each) for each in cut):
                return None
            joined = _joined_to_nothing(graph, found[0])  # type: ignore[arg-type]
            return _AtAny(cut | joined, flags)
    return None


def _is_feature(graph: Graph, name: str, dim: int) -> bool:
    """Return whether it is a dim of a parameter, or the last of several: a plan may shard it.

    Dims of tensors that are created with a length are not.
    """
    stored = {use.stored for use in graph.uses if not use.is_buffer}
    creators = (op for op in graph.ops if not op.inputs or op.call.op.startswith("new_"))
    if name in {out for op in creators for out in op.outputs}:
        return False
    return name in stored or 0 < dim == len(graph.tensors[name].shape) - 1


def _ruled(graph: Graph) -> list[Any]:
    """Return the ops in order: what they are, their operands, and their rules without sizes."""
    return [(op.module, op.traced_call, op.call.op, op.inputs, _rule(op)) for op in graph.ops]


def _rule(op: Op) -> str:
    if op.call.op in ("slice", "select", "slice_scatter", "select_scatter"):
        return ""
    # The rule of `cat` leaves out what is empty, as what was before the first step is.
    return f"along {_along(op)}" if op.call.op == "cat" else str(rule_for(op.call))


def _along(op: Op) -> int:
    return op.call.dim(ndim=len(op.call.results[0]))


def _joined_to_nothing(graph: Graph, other: Graph) -> set[tuple[str, int]]:
    """Return the dims of results of `cat` with operands that are empty in one graph alone."""
    pairs = ((a, b) for a, b in zip(graph.ops, other.ops, strict=True) if a.call.op == "cat")
    return {(a.outputs[0], _along(a)) for a, b in pairs if _empty(a) != _empty(b)}


def _empty(op: Op) -> list[bool]:
    return [0 in shape for shape in op.call.operands]


@contextmanager
def _hiding(
    module: nn.Module,
    names: Sequence[str],
    sign: int,
    value: int | None,
    shows: Callable[[], Shows],
) -> Iterator[None]:
    """Context manager in which `module` gets the numbers `names` opaque, in a mode from `shows`.

    They have the values of the runs, or other ones that depend on `value`.
    """
    positions = argument_names(module.forward)

    def hiding(forward: Forward) -> Forward:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            def hide(name: str, given: Any) -> Any:
                if not isinstance(given, (int, float)) or name not in names:
                    return given
                other = given if value is None else type(given)(value + 6 * names.index(name))
                return hidden(other, sign, mode.asked)

            mode = shows()
            first = [hide(*pair) for pair in zip(positions, args, strict=False)]
            named = {name: hide(name, given) for name, given in kwargs.items()}
            with mode:
                return forward(*first, *args[len(first) :], **named)

        return run

    undo = put_around(module, hiding)
    try:
        yield
    finally:
        undo()
