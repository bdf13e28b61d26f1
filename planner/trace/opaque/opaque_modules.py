"""Modules that cannot be traced, because what they do depends on data, stand for themselves.

Such a module is one op without a rule: what goes in, its parameters and what comes out are
replicated, and on every rank it runs as it is. `random_inputs.py` finds what it gives out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwright.planner.contract.names import pattern
from shardwright.planner.trace.data_queries.branch_paths import BranchPaths, both
from shardwright.planner.trace.data_queries.errors import DATA_DEPENDENT, BranchesOnData
from shardwright.planner.trace.model.module_copies import duplicate
from shardwright.planner.trace.opaque.argument_objects import Objects
from shardwright.planner.trace.opaque.random_inputs import (
    Given,
    Object,
    Outcome,
    Spec,
    outcome,
    state,
    stated,
)
from shardwright.planner.trace.record.wrapped_forwards import put_instead
from shardwright.planner.trace.runs.run import Run, in_mode
from shardwright.runtime.slots import is_own

META = torch.device("meta")

Make = Callable[[str, list[Tensor], list[Spec]], list[Tensor]]
"""From the name of a module, the tensors it takes and what comes out to that."""


class Opaque:
    """The modules of `root` that are not traced; `root` itself is left as it is.

    `alike` maps each to one of them that does the same. `stand_ins` says whether numbers that
    only data has get one (see `data_queries/`), `stood_in` whether one did, and `branch_paths`
    which runs are then made, of those that are asked for (see `branch_paths.py`). `skips` says
    whether what code may skip is traced as if it always ran.
    """

    def __init__(
        self,
        root: nn.Module,
        alike: Mapping[str, str] | None = None,
        stand_ins: bool = True,
        branch_paths: BranchPaths = (),
        skips: bool = False,
    ) -> None:
        self.root, self.branch_paths, self.skips = root, branch_paths, skips
        self.stand_ins, self.stood_in = stand_ins, False
        self.alike = dict(alike or {})
        self._copies = {n: duplicate(root.get_submodule(n)) for n in set(self.alike.values())}
        self._known: dict[tuple[str, Given, str, bool], Outcome] = {}

    def after(self, error: Exception, entered: Sequence[str]) -> bool:
        """Take in what a run failed at; False where nothing is left to try."""
        if isinstance(error, BranchesOnData) and (
            paths := both(self.branch_paths, error.traced_call)
        ):
            self.branch_paths = paths
            return True
        if isinstance(error, BranchesOnData) and not self.skips:
            self.skips, self.branch_paths = True, ()
            return True
        if any(answers for _, answers in self.branch_paths) and self._needs_data(error, entered):
            return True
        if self.stand_ins and self.stood_in:
            self.drop_stand_ins()
            return True
        return self._needs_data(error, entered)

    def drop_stand_ins(self) -> None:
        """From here on numbers that only data has get no stand-in, so no questions are answered."""
        self.stand_ins, self.branch_paths = False, ()

    def _needs_data(self, error: Exception, entered: Sequence[str]) -> bool:
        return isinstance(error, DATA_DEPENDENT) and self.widen(entered)

    def made(self, runs: Sequence[Run]) -> list[Run]:
        """`runs` as they are made: some of them twice. They may be the first of all runs."""
        self.branch_paths = self.branch_paths or tuple((i, ()) for i in range(len(runs)))
        return [runs[i]._replace(answers=a) for i, a in self.branch_paths if i < len(runs)]

    def widen(self, entered: Sequence[str]) -> bool:
        """Take in the innermost of the modules `entered` that is not in yet, with others like it.

        False if that is `root` itself.
        """
        name = next((n for n in reversed(entered) if n not in self.alike), "")  # "" is `root`
        if not name:
            return False
        kind = type(self.root.get_submodule(name))
        for other, module in self.root.named_modules():
            if type(module) is kind and pattern(other) == pattern(name):
                self.alike[other] = other
                self._copies[other] = duplicate(module)
        return True

    def used_from_outside(self, called: Iterable[str]) -> list[str]:
        """Where one of the modules `called` is within one of these: the latter, and those around.

        A plan may change what such a module takes and gives, for all its calls.
        """
        seen = {id(self.root.get_submodule(name)) for name in called}
        for name in self.alike:
            parts = name.split(".")
            _, *within = self.root.get_submodule(name).modules()
            if not seen.isdisjoint(map(id, within)):
                return [".".join(parts[: i + 1]) for i in range(len(parts))]
        return []

    @contextmanager
    def standing_in(self, root: nn.Module, make: Make) -> Iterator[None]:
        """Within, calls of these modules in `root`, a copy maybe, give what `make` gives."""
        with ExitStack() as undo:
            for name in self.alike:
                module = root.get_submodule(name)
                undo.callback(put_instead(module, self._forward(name, module, make)))
            yield

    def _forward(self, name: str, module: nn.Module, make: Make) -> Callable[..., Any]:
        @wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs), is_leaf=is_own)
            objects = Objects([v for v in leaves if is_own(v)])
            said = tuple(Object if is_own(v) else stated(v) for v in leaves)
            given = Given(said, objects.described(stated))
            result = self._result(self.alike[name], given, spec, objects, module.training)
            read = map(objects.parts.__getitem__, result.touched)
            tensors = [t for t in (*leaves, *state(module), *read) if isinstance(t, Tensor)]
            values = [*result.found, *(change.value for change in result.changes)]
            made = iter(make(name, tensors, [v for v in values if isinstance(v, Spec)]))
            filled = [next(made) if isinstance(v, Spec) else v for v in values]
            found, left = filled[: len(result.found)], filled[len(result.found) :]
            for change, value in zip(result.changes, left, strict=True):
                objects.put(change._replace(value=META if type(value) is torch.device else value))
            return tree_unflatten(found, result.tree)

        return forward

    def _result(
        self, name: str, given: Given, spec: TreeSpec, objects: Objects, training: bool
    ) -> Outcome:
        """What comes of a call of module `name` in a mode.

        Raises:
            NeedsData: that depends on data, or the module does more than to compute it.
        """
        key = name, given, str(spec), training
        if key not in self._known:
            with in_mode(self._copies[name], training):
                self._known[key] = outcome(name, self._copies[name], given, spec, objects)
        return self._known[key]
