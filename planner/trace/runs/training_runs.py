"""Training mode: runs in it are traced only if code does something else there than in eval mode.

Dropout does not count: all ranks drop the same elements of replicated tensors, and of a shard what
is dropped at that place of the full tensor (see `Functional` in `recording_modes.py`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.queries.flags import add_flags
from shardwright.planner.trace.queries.questions import Asked
from shardwright.planner.trace.runs.run import Run, in_mode
from shardwright.planner.trace.runs.trace_runs import trace_runs
from shardwright.planner.trace.trace_lock import alone

ELSE = ("ops", "marks", "trained", "unpriced", "draws", "flags", "places")
COMPARED = [f.name for f in fields(Graph) if f.name not in ELSE]


def in_training(runs: Sequence[Run]) -> list[Run]:
    """Return the same runs in training mode."""
    return [run._replace(training=True) for run in runs]


@contextmanager
def no_python_random() -> Iterator[None]:
    """Refuse code that draws random numbers with Python or NumPy: they would differ by rank.

    Raises:
        ModelError: at the end, if code drew such numbers.
    """
    before = _generators()
    yield
    if _generators() != before:
        raise ModelError("it draws random numbers with Python or NumPy: draw them with torch")


def _generators() -> tuple[Any, ...]:
    """Return the states of the random generators of Python and NumPy."""
    numpy: Any = sys.modules.get("numpy")
    kind, keys, *rest = numpy.random.get_state() if numpy else (None, b"")
    return random.getstate(), kind, bytes(keys), *rest


def note_training(graph: Graph, source: Source, asked: Asked) -> None:
    """Set `graph.trained` if the runs of `source` compute the same in training mode.

    `asked` are the queries noted while `graph` was traced.
    """
    if any(run.training for run in source.runs):
        return
    if not (asked.training or graph.untraced or changes_more(source.module)):
        graph.trained = True
        return
    try:
        with alone(), no_python_random():
            other = trace_runs(source.module, in_training(source.runs))
    except ModelError:
        return
    graph.trained = same(graph, other)
    if graph.trained:
        graph.marks.drawn = other.marks.drawn
        add_flags(graph.flags, other.flags)


def changes_more(root: nn.Module) -> bool:
    """Return whether `train()` may change more of the modules than their mode.

    Modules whose class defines `training` itself count as well.
    """
    kinds = {type(m) for m in root.modules()}
    if any(hasattr(kind, "training") for kind in kinds):
        return True
    if all(kind.train is nn.Module.train for kind in kinds):
        return False
    before = _state(root)
    try:
        with in_mode(root, True):
            return _state(root) != before
    except Exception:  # any exception of model code; tracing will raise it again
        return True


def _state(root: nn.Module) -> list[Any]:
    """Return the ids of all attributes but `training`, and of entries of private dicts."""
    found = [(key, value) for m in root.modules() for key, value in vars(m).items()]
    tables = [(id(v), *v.items()) for k, v in found if k[:1] == "_" and isinstance(v, dict)]
    every = [*found, *((k, v) for _, *items in tables for k, v in items)]
    return [(key, id(value)) for key, value in every if key != "training"]


def same(one: Graph, other: Graph) -> bool:
    """Return whether two fresh graphs are equal, apart from source lines and random draws."""
    ends = [(replace(g.marks, drawn=set()), [*map(_elsewhere, g.ops)]) for g in (one, other)]
    return ends[0] == ends[1] and all(getattr(one, n) == getattr(other, n) for n in COMPARED)


def _elsewhere(op: Op) -> Op:
    return op._replace(source="")
