"""The calls that a plan is made for: the call of the root, and further calls.

All of them are traced into one graph, one after the other, so that a module has the same placements
in each call. Calls that are not `priced`, and calls in training mode, do not count for the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.errors import ModelError
from shardwright.planner.contract.names import PAGED, is_within
from shardwright.planner.trace.data_queries import branch_paths
from shardwright.planner.trace.runs.decoding import empty_cache, without_state
from shardwright.planner.trace.state.attribute_contents import KeptContents
from shardwright.runtime.calls.paged import paged_attention, traced_cache
from shardwright.runtime.slots import state_of

State = Mapping[str, Any]
"""State (a cache) that a model keeps from one call to the next, by the argument that takes it."""


class Run(NamedTuple):
    """A call of the root (""), or of a module in it by itself; tensors are on meta.

    Attributes:
        module: Path of the module that is called.
        args: Positional arguments.
        kwargs: Arguments by name.
        dtype: The module runs in this dtype instead of its own. No other run may use the module.
        answers: Answers to the first branches on data of which both sides go on (see
            `branch_paths.py`).
        priced: Whether the run has a cost. Otherwise it only constrains the plan, and the last dim
            of its floating inputs is a size of the model, not a run-time size.
        fills: The argument for which the run gets an empty cache.
        batched: Whether it is a call of continuous batching; it fills a paged cache.
        resumes: Whether the run gets the state that the last run before it returned. Without any
            state it is changed by `without_state`, or refused.
        training: Whether the run is made in training mode, and not priced. Other runs keep the mode
            of the modules.
        by_rows: On the first run: whether attention in all runs is traced with queries sharded
            along the sequence (see `attention_rows.py`).
        again: Whether the run repeats the one before it, with the module attributes that it left
            (see `persistent_state.py`).
        given: Whether the user asked for it, so that it must be traced.
    """

    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype | None = None
    answers: tuple[bool, ...] = ()
    priced: bool = True
    fills: str = ""
    batched: bool = False
    resumes: bool = False
    training: bool = False
    by_rows: bool = False
    again: bool = False
    given: bool = False

    @property
    def made_up(self) -> bool:
        """Whether it may be dropped: a plan for training needs those in training mode."""
        return not (self.given or self.training)


class RunRefused(ModelError):
    """A run cannot be traced, but those before it can.

    `behind` is the number of runs from it to the last.
    """

    behind = 0


class NoCache(ValueError):
    """A run goes on from a cache, and no call before it leaves one."""


def needs_cache(run: Run) -> bool:
    """Return whether a run cannot be made, nor a call in its place, if no call left a cache."""
    return run.resumes and without_state(run.kwargs) is None


def dtype_of(runs: Iterable[Run], fqn: str, own: torch.dtype) -> torch.dtype:
    """Return the dtype of parameter or buffer `fqn` in `runs`; `own` is the dtype in the model."""
    found = (r.dtype for r in runs if r.dtype and is_within(fqn, r.module))
    return next(found, own) if own.is_floating_point else own


def cast(root: nn.Module, runs: Sequence[Run]) -> None:
    """Convert parameters and buffers of `root` (on meta) to the dtypes of `runs`, in place."""
    if not any(run.dtype for run in runs):
        return
    for path, module in root.named_modules():
        stores: list[dict[str, Any]] = [module._parameters, module._buffers]
        for store in stores:
            for name, tensor in store.items():
                if tensor is None:
                    continue
                dtype = dtype_of(runs, f"{path}.{name}", tensor.dtype)
                if dtype != tensor.dtype:
                    new = torch.empty_like(tensor, dtype=dtype)
                    kept = isinstance(tensor, nn.Parameter)
                    store[name] = nn.Parameter(new, tensor.requires_grad) if kept else new


@contextmanager
def in_mode(root: nn.Module, training: bool) -> Iterator[None]:
    """Context manager that puts `root` into training mode by `train()`, if `training` is set."""
    if not training:
        yield
        return
    before = [(m, m.training) for m in root.modules()]
    try:
        root.train()
        yield
    finally:
        root.train(before[0][1])  # some modules change more than their mode
        for module, mode in before:
            module.training = mode


class Runner(nn.Module):
    """Makes several runs of `root` in its forward.

    `begin` is called with the number and the state of each run, `end` with the state after the run
    and its result. Each run is made within `around`. With `on_fake`, model code sees that it has
    fake tensors, so a run may ask fewer questions than it has answers.
    """

    def __init__(
        self,
        root: nn.Module,
        begin: Callable[[int, State], None] = lambda traced_call, state: None,
        end: Callable[[State, Any], None] = lambda state, result: None,
        on_fake: bool = False,
    ) -> None:
        super().__init__()
        self.root, self.begin, self.end, self.on_fake = root, begin, end, on_fake
        self.now = 0
        """Number of the traced call that runs."""
        self.around: Callable[[Run], AbstractContextManager[None]] = lambda run: nullcontext()
        self.left_outside: Callable[[], list[Any]] = list
        """Returns what code has left outside of modules since all runs began."""

    def forward(self, runs: Sequence[Run]) -> list[Any]:
        """Return the result of each run, in order.

        Raises:
            NoCache: a run needs the state of the run before it, which left none.
        """
        found: list[Any] = []
        left: State = {}
        kept = KeptContents(self.root) if any(run.again for run in runs) else None
        for traced_call, run in enumerate(runs):
            self.now, state = traced_call, left if run.resumes else {}
            if run.batched:  # no later run resumes it, so the cache is made by hand
                state = {PAGED: traced_cache(self.root)}
            self.begin(traced_call, state)
            given = run.kwargs if state or not run.resumes else without_state(run.kwargs)
            if given is None:
                raise NoCache("it goes on from a cache, and no call before it leaves one")
            if run.fills and not state:
                state = {run.fills: empty_cache(self.root)}
            module = self.root.get_submodule(run.module)
            if kept is not None and run.training and not runs[traced_call - 1].training:
                kept.restore()  # users may train without a run in eval mode before
            taken = branch_paths.taken(traced_call, run.answers, not self.on_fake)
            paging = paged_attention(self.root) if run.batched else nullcontext()
            with taken, in_mode(self.root, run.training), self.around(run), paging:
                found.append(module(*run.args, **{**given, **state}))
            self.end(state if run.resumes else {}, found[-1])
            left = left if run.module else state_of(found[-1], module) or state or left
        return found
