"""Conditional regions: recorded calls that may not run on real data (loop passes, skipped code).

The trace contains every pass that any data could cause, and all code that may be skipped. At run
time some or none of it runs. The plan is still correct if each tensor that a region changes in
place or passes on has one state before and after: it then does not matter which changes are made.
Other results of a region must not be read outside of it. Ranks do not communicate in a region that
some of them may run alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from shardwright.planner.graph.axes import leaves_of, refine
from shardwright.planner.graph.graph import Graph
from shardwright.planner.trace.data_queries.conditional_code import ConditionalCode, skipped_code
from shardwright.planner.trace.data_queries.errors import NeedsData
from shardwright.planner.trace.data_queries.model_code import frames
from shardwright.planner.trace.record.op_tensors import tensors_in
from shardwright.planner.trace.sizes.expressions import reads_of
from shardwright.rules.call import name_of

SAME = {"detach", "lift_fresh_copy"}
"""Ops that return their operand."""


@dataclass
class Region:
    """The calls of a loop over rows, or of code that a test may skip (one pass)."""

    mask: Tensor | None = None
    """The mask that selects the rows of a loop; its length must be a size of the model."""

    starts: list[int] = field(default_factory=list)
    """The number of the first call of each pass."""

    stop: int | None = None
    """The number of the first call after the last pass; None until the region has ended."""

    rebound: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """For each rebound name, its tensor before and after a pass.

    Code reads the first if the pass does not run.
    """

    same_on_all_ranks: bool = False
    """Whether all ranks run the region or none does, so that they may communicate in it."""

    def pass_of(self, call: int) -> int:
        """Return the number of the pass that contains a call; -1 for a call outside."""
        inside = self.stop is not None and call < self.stop
        return bisect_right(self.starts, call) - 1 if inside else -1


@dataclass
class _Skippable:
    """Skippable code that runs now, or is still ahead."""

    frame: Any
    code: ConditionalCode
    region: Region
    before: Mapping[str, Tensor]
    ahead: bool


class Regions:
    """The regions of a run; `now` returns the number of calls so far."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self.found: list[Region] = []
        self.passes = 0
        """The number of loops that are in a pass."""
        self._open: list[_Skippable] = []

    def skippable(self, frame: Any, rows: int | None = None) -> bool | None:
        """Return the answer to the test at `frame` with which the skippable code runs.

        With `rows`, the test is about a length, and the code must run for this length. Returns None
        if the test decides more than to skip code.
        """
        values, file = frame.f_locals, frame.f_code.co_filename
        code = skipped_code(file, frame.f_lineno, values, tensors_of(values), rows)
        if code is None:
            return None
        self.settle()
        before = {name: inner(values[name]) for name in code.rebound}
        alike = rows is None and bool(before)  # the number of selected rows may differ by rank
        self.found.append(region := Region(starts=[self.now()], same_on_all_ranks=alike))
        ahead = not code.first <= frame.f_lineno <= code.last
        self._open.append(_Skippable(frame, code, region, before, ahead))
        return code.answer

    def settle(self) -> None:
        """Close the regions whose code no longer runs."""
        running = [*frames()] if self._open else ()
        for one in list(self._open):
            line, test = one.frame.f_lineno if one.frame in running else 0, one.code.test
            within = one.code.first <= line <= one.code.last
            one.ahead &= not within and test is not None and test.lineno <= line < one.code.first
            if not (within or one.ahead):
                self._close(one)

    def ended(self) -> list[Region]:
        """Close and return all regions at the end of a run.

        Raises:
            NeedsData: a loop was left early.
        """
        for one in list(self._open):
            self._close(one)
        if any(region.stop is None for region in self.found):
            raise NeedsData("a loop over data ends early")
        return self.found

    def _close(self, one: _Skippable) -> None:
        self._open.remove(one)
        one.region.stop = self.now()
        one.region.rebound += _rebound(one.before, one.frame)

    def loop(
        self, mask: Tensor, frame: Any, code: ConditionalCode, rows: Iterable[Any]
    ) -> Generator[Any]:
        """Yield each of `rows` for a pass of the loop in `frame` over rows of `mask`."""
        self.found.append(region := Region(inner(mask)))
        for row in rows:
            region.starts.append(self.now())
            before = {name: inner(frame.f_locals[name]) for name in code.rebound}
            self.passes += 1
            yield row
            self.passes -= 1
            region.rebound += _rebound(before, frame)
        region.stop = self.now()


def tensors_of(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the names whose values are tensors."""
    return frozenset(name for name, value in values.items() if isinstance(value, Tensor))


def _rebound(before: Mapping[str, Tensor], frame: Any) -> list[tuple[Tensor, Tensor]]:
    after = {name: frame.f_locals.get(name) for name in before}
    if any(not isinstance(value, Tensor) for value in after.values()):
        raise NeedsData("code that may be skipped assigns a non-tensor to the name of a tensor")
    return [(value, inner(after[name])) for name, value in before.items()]


def inner(value: Any) -> Any:
    """Return the fake tensor that holds the current value of a functional tensor."""
    elem = value.elem if isinstance(value, FunctionalTensor) else value
    if not (isinstance(elem, Tensor) and torch._is_functional_tensor(elem)):
        return value
    torch._functionalize_sync(elem)
    return torch._from_functional_tensor(elem)


def known(value: Any) -> bool:
    """Return whether a tensor is a constant that code states, so that its value is known."""
    return isinstance(value, Tensor) and getattr(inner(value), "constant", None) is not None


def changed(
    calls: Sequence[Any],
    regions: Sequence[Region],
    replaced: Sequence[tuple[Tensor, Tensor]],
    results: Iterable[Tensor],
    values: Container[Tensor],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors that passes change, before and after each change.

    Args:
        calls: All calls (`args`, `kwargs`, `result`) that were made.
        regions: The regions of these calls.
        replaced: Tensors after and before an in-place change.
        results: Tensors that are read after all calls.
        values: Tensors whose values are known without data, beside those that code states.

    Raises:
        NeedsData: another result of a pass is read outside of it, or a changed tensor has a known
            value, which would be the value after all passes.
    """
    if not regions:
        return
    first: dict[int, Tensor] = {}  # id of an alias -> the first of the equal tensors

    def one(tensor: Tensor) -> Tensor:
        return first.get(id(tensor), tensor)

    maker: dict[int, int] = {}
    readers: list[tuple[int, Tensor]] = []
    for i, call in enumerate(calls):
        if name_of(call.op) in SAME:
            first[id(call.result)] = one(call.args[0])
            continue
        readers += [(i, one(t)) for t in tensors_in((call.args, dict(call.kwargs)))]
        maker |= {id(t): i for t in tensors_in(call.result)}
    readers += [(len(calls), one(t)) for t in results]
    was = {id(one(now)): one(before) for now, before in replaced}
    fixed = [(one(now), one(old)) for now, old in replaced if known(now) or now in values]
    made = sorted(((maker[id(t)], at, t) for at, t in readers if id(t) in maker), key=itemgetter(0))
    for region in (r for r in regions if r.starts):

        def made_in(tensor: Tensor, region: Region = region) -> int:
            return region.pass_of(maker.get(id(tensor), -1))

        was_before = {**was, **{id(one(now)): one(before) for before, now in region.rebound}}
        if any(0 <= made_in(now) != made_in(before) for now, before in fixed):
            raise NeedsData("a loop over data changes a tensor whose value the trace knows")
        first_call, stop = bisect_left(made, region.starts[0], key=itemgetter(0)), region.stop
        own = made[first_call : bisect_left(made, stop or 0, key=itemgetter(0))]
        read = {id(t): t for by, at, t in own if region.pass_of(by) != region.pass_of(at)}
        for tensor in read.values():
            while made_in(tensor) >= 0:
                if (before := was_before.get(id(tensor))) is None:
                    raise NeedsData("a tensor made in a loop over data is read outside of its pass")
                if (before.shape, before.dtype) != (tensor.shape, tensor.dtype):
                    raise NeedsData("code that may be skipped changes a tensor's shape or dtype")
                yield before, tensor
                tensor = before


def masks_have_stated_lengths(graph: Graph) -> bool:
    """Return whether the length of each loop mask is a parameter's size or stated by model code.

    If it is the size of an input or depends on data, there may be more rows than in the trace.
    """
    marks = graph.marks
    if not marks.loop_masks:
        return True
    axes = refine(graph)

    def atoms(dims: Iterable[tuple[str, int]]) -> set[int]:
        return {a.id for name, dim in dims for a in leaves_of(axes.dims[name][dim])}

    def every(names: Iterable[str]) -> set[int]:
        return atoms((n, dim) for n in names for dim in range(len(axes.dims[n])))

    stated = {(s.tensor, s.dim) for s in graph.sizes if s.dim >= 0 and not reads_of(s.expression)}
    said = every(u.stored for u in graph.uses) | atoms(stated - marks.data_sized)
    return atoms((n, 0) for n in marks.loop_masks) <= said - every(graph.inputs) - atoms(
        marks.data_sized
    )
