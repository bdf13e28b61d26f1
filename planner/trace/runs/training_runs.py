"""Training mode: nothing new where code does there what it does in eval mode, else traced besides.

What dropout drops is left out of it: ranks drop the same of what all have, and of a part what is
dropped of the whole there (see `Functional` in `recording_modes.py`).
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
    """The same calls in training mode."""
    return [run._replace(training=True) for run in runs]


@contextmanager
def no_python_random() -> Iterator[None]:
    """Within, code must not draw random numbers with Python or NumPy: each rank would draw others.

    Raises:
        ModelError: behind it, that it did.
    """
    before = _generators()
    yield
    if _generators() != before:
        raise ModelError("it draws random numbers with Python or NumPy: draw them with torch")


def _generators() -> tuple[Any, ...]:
    """Where the generators of Python and NumPy stand."""
    numpy: Any = sys.modules.get("numpy")
    kind, keys, *rest = numpy.random.get_state() if numpy else (None, b"")
    return random.getstate(), kind, bytes(keys), *rest


def note_training(graph: Graph, source: Source, asked: Asked) -> None:
    """Look whether the runs of `source`, as `graph` has them, do the same in training mode.

    `asked` is what was noted while it was traced.
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
    """Whether modules change more than their modes where they are told to train.

    Or may: some answer by themselves whether they do.
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
    except Exception:  # whatever their code raises: it will raise it again where they are traced
        return True


def _state(root: nn.Module) -> list[Any]:
    """What modules hold, but for their modes: values by id, those of their own tables too."""
    found = [(key, value) for m in root.modules() for key, value in vars(m).items()]
    tables = [(id(v), *v.items()) for k, v in found if k[:1] == "_" and isinstance(v, dict)]
    every = [*found, *((k, v) for _, *items in tables for k, v in items)]
    return [(key, id(value)) for key, value in every if key != "training"]


def same(one: Graph, other: Graph) -> bool:
    """Whether two fresh graphs are alike, but for where in the code it stands."""
    ends = [(replace(g.marks, drawn=set()), [*map(_elsewhere, g.ops)]) for g in (one, other)]
    return ends[0] == ends[1] and all(getattr(one, n) == getattr(other, n) for n in COMPARED)


def _elsewhere(op: Op) -> Op:
    return op._replace(source="")
