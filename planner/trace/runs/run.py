"""The calls that a plan is made for: that of the root, and others that run more of its modules.

All are traced into one graph, one after the other, so that what a module does is the same in each
of them. What a plan costs is what the first costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.planner.contract.names import is_within
from shardwright.planner.trace.data_queries import branch_paths
from shardwright.planner.trace.runs.decoding import empty_cache, without_state
from shardwright.planner.trace.state.attribute_contents import KeptContents
from shardwright.runtime.slots import state_of

State = Mapping[str, Any]
"""What a model keeps from one call for the next, a cache, by the argument that takes it."""


class Run(NamedTuple):
    """A call of the root (""), or of a module in it by itself; tensors are on meta.

    Where it has a `dtype`, the module runs in that instead of its own: how it is best split does
    not depend on it. No other run may use the module then. Where its code goes on either way from
    questions that only data answers, `answers` are those of the first of them (see
    `branch_paths.py`). One that is not `priced` only says what must hold besides; the last dim of
    what is real in it is the model's, not one of run-time size. One that
    `resumes` is given the state that the last run before it gave; where none gave any it is made
    as `without_state` has it, or not. One that is `training` is made in training mode, and not
    priced either; any other in the mode that the modules are in. Where the first is `by_rows`,
    attention in all is traced as what each rank does with its part of the queries (see
    `attention_rows.py`). One that is `again` is the one before it, with what that left in
    attributes of modules (see `persistent_state.py`).
    """

    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype | None = None
    answers: tuple[bool, ...] = ()
    priced: bool = True
    fills: str = ""
    resumes: bool = False
    training: bool = False
    by_rows: bool = False
    again: bool = False


def dtype_of(runs: Iterable[Run], fqn: str, own: torch.dtype) -> torch.dtype:
    """The dtype that parameter or buffer `fqn` has in `runs`, where `own` is its own."""
    found = (r.dtype for r in runs if r.dtype and is_within(fqn, r.module))
    return next(found, own) if own.is_floating_point else own


def cast(root: nn.Module, runs: Sequence[Run]) -> None:
    """Give parameters and buffers of `root`, which is on meta, the dtypes that `runs` want."""
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
    """Within, `root` is as its `train()` leaves it, if that is asked for."""
    if not training:
        yield
        return
    before = [(m, m.training) for m in root.modules()]
    try:
        root.train()
        yield
    finally:
        root.train(before[0][1])  # some do more then
        for module, mode in before:
            module.training = mode


class Runner(nn.Module):
    """Makes several runs of `root` in its forward.

    `begin` is told the number of each and its state, and `end` the state after it and what it gave;
    each is made within `around`. On fake tensors not all questions may be asked: model code can see
    that there is no data.
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
        self.around: Callable[[Run], AbstractContextManager[None]] = lambda run: nullcontext()

    def forward(self, runs: Sequence[Run]) -> list[Any]:
        """What each of `runs` returns, in their order; None for one that is not made."""
        found: list[Any] = []
        left: State = {}
        kept = KeptContents(self.root) if any(run.again for run in runs) else None
        for traced_call, run in enumerate(runs):
            state = left if run.resumes else {}
            self.begin(traced_call, state)
            given = run.kwargs if state or not run.resumes else without_state(run.kwargs)
            if given is None:
                found.append(None)
                continue
            if run.fills:
                state = {run.fills: empty_cache(self.root)}
            module = self.root.get_submodule(run.module)
            if kept is not None and run.training and not runs[traced_call - 1].training:
                kept.restore()  # nobody need run it in eval mode first
            taken = branch_paths.taken(traced_call, run.answers, not self.on_fake)
            with taken, in_mode(self.root, run.training), self.around(run):
                found.append(module(*run.args, **{**given, **state}))
            self.end(state if run.resumes else {}, found[-1])
            left = left if run.module else state_of(found[-1], module) or state or left
        return found
