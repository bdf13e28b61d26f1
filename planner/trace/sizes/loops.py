"""Loops that run as often as lengths say: over `range(n)`, or over the parts of a split tensor.

If a loop runs once or not at all, its trace does not show what one run takes of the run before.
That it did so is noted as a comparison of lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardwright.planner.trace.data_queries.model_code import frames, is_plumbing, module_of
from shardwright.planner.trace.sizes.callers import THROUGH
from shardwright.planner.trace.sizes.expressions import Expression
from shardwright.planner.trace.sizes.provenance import Provenance, SourcedInt, expression_of


@contextmanager
def ranges_noted(root: nn.Module) -> Iterator[None]:
    """Context manager in which files with classes of `root` use `_Range` in place of `range`."""
    files = {c.__module__ for m in root.modules() for c in type(m).__mro__}
    names = [vars(sys.modules[f]) for f in files if f in sys.modules and not is_plumbing(f)]
    names = [own for own in names if "range" not in own]
    for own in names:
        own["range"] = _Range
    try:
        yield
    finally:
        for own in names:
            own.pop("range", None)


class _OfRange(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, range)

    def __call__(cls, *args: Any) -> range:
        made = range(*args)
        lengths = [x for x in args if isinstance(x, SourcedInt)]
        if lengths and len(made) < 2:
            first, last, step = {1: (0, *args, 1), 2: (*args, 1), 3: args}[len(args)]
            low, high = (first, last) if step > 0 else (last, first)
            runs: Expression = ("-", expression_of(high), expression_of(low))
            _note(lengths[0].provenance, runs, ("constant", 0), len(made) < 1)
            _note(lengths[0].provenance, runs, expression_of(abs(step)), True)
        return made


class _Range(metaclass=_OfRange):
    """It makes ranges, and notes that one is empty or of one number because of lengths."""


def note_parts(provenance: Provenance, x: Tensor, size: Any, dim: int) -> None:
    """Note that `x` is split into one part, of `size` at most."""
    given = provenance.read(x, x.shape)[dim]
    _note(provenance, expression_of(given), expression_of(size), True)


def _note(provenance: Provenance, left: Expression, right: Expression, outcome: bool) -> None:
    through = (f"{__package__}.", *THROUGH)
    frame = next(f for f in frames() if not module_of(f).startswith(through))
    provenance.tests.note("<=", left, right, outcome, provenance.innermost, frame)
