"""Opaque modules: modules that depend on data and cannot be traced become one op each.

The op has no rule. Its inputs, parameters and outputs are replicated, and every rank runs the
unsharded module. `random_inputs.py` finds its outputs.
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
from shardwright.planner.trace.data_queries.branch_paths import BranchPaths, both, fewer
from shardwright.planner.trace.data_queries.errors import DATA_DEPENDENT, AsksLess, BranchesOnData
from shardwright.planner.trace.data_queries.known_values import KnownValues
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
"""Function of a module's name, the tensors it takes and the specs of its outputs to the outputs."""


class Opaque:
    """The modules of `root` that are not traced, and other settings of a trace.

    `root` itself is not changed.

    Attributes:
        alike: Untraced module -> an untraced module that does the same.
        stand_ins: Whether numbers that depend on data get stand-ins (see `data_queries/`).
        stood_in: Whether a number got a stand-in.
        branch_paths: The traced calls, with their answers to branches (see `branch_paths.py`).
        skips: Whether skippable code is traced as if it always ran.
        stateful: Untraced modules whose calls change their attributes.
        settled: Whether these settings stay as they are, whatever fails with them.
        shortened: Whether a block stands for more than it: all of them branch where it does.
    """

    def __init__(
        self,
        root: nn.Module,
        alike: Mapping[str, str] | None = None,
        stand_ins: bool = True,
        branch_paths: BranchPaths = (),
        skips: bool = False,
        settled: bool = False,
        shortened: bool = False,
    ) -> None:
        self.root, self.branch_paths, self.skips = root, branch_paths, skips
        self.settled, self.shortened = settled, shortened
        self.stand_ins, self.stood_in = stand_ins, False
        self.alike = dict(alike or {})
        self.stateful: set[str] = set()
        self._modes: list[bool] = []
        self._branching: dict[str, str] = {}
        """Pattern -> first module of that pattern that asked a question with two answers."""
        self._endless: set[tuple[str, int]] = set()
        """Lines of code that end a loop, or do not, more often than is traced."""
        self._refuted: set[int] = set()
        """Runs that asked less than a run like it: nothing is taken from others any more."""
        self._copies = {n: duplicate(root.get_submodule(n)) for n in set(self.alike.values())}
        self._known: dict[tuple[str, Given, str, bool], Outcome] = {}

    def after(self, error: Exception, entered: Sequence[str], made_up: bool = False) -> bool:
        """Change the settings after a failed run; returns False if nothing is left to try.

        A run that is `made_up` does not cost the stand-ins of the runs before it, unless these
        have branches.
        """
        if self.settled:
            return False
        if isinstance(error, BranchesOnData) and self._answered_twice(error, entered):
            return True
        if isinstance(error, AsksLess):
            run, _ = self.branch_paths[error.traced_call]
            if run not in self._refuted:
                self._refuted.add(run)
                self.branch_paths = fewer(self.branch_paths, error.traced_call, error.asked)
                return True
        if isinstance(error, BranchesOnData) and not self.skips:
            self.skips, self.branch_paths = True, ()
            return True
        branches = any(answers for _, answers in self.branch_paths)
        if branches and self._needs_data(error, entered):
            return True
        if self.stand_ins and self.stood_in and (branches or self.skips or not made_up):
            self.drop_stand_ins()
            return True
        return self._needs_data(error, entered)

    def _answered_twice(self, error: BranchesOnData, entered: Sequence[str]) -> bool:
        """Have a question answered both ways; returns False if there are too many.

        If two blocks of a shortened stack ask the same, its other blocks ask it as well.
        """
        module = entered[-1] if entered else ""
        alike = self._branching.setdefault(pattern(module), module)
        if self.shortened and not self.skips and alike != module:
            return False
        if error.line in self._endless:
            return False
        call, chain = error.traced_call, [module] == [*self._branching.values()]
        ahead = self.branch_paths[call][0] not in self._refuted
        if paths := both(self.branch_paths, call, self._like(call), chain, ahead):
            self.branch_paths = paths
        elif chain and error.line:
            self._endless.add(error.line)
        return paths is not None

    def _like(self, traced_call: int) -> set[int]:
        """Return the runs in the mode of a traced call, which may ask the same."""
        mode = self._modes[self.branch_paths[traced_call][0]]
        return {i for i, m in enumerate(self._modes) if m == mode} - self._refuted

    def drop_stand_ins(self) -> None:
        """Use no stand-ins from now on. Branches on data then get no answers either."""
        self.stand_ins, self.branch_paths = False, ()

    def _needs_data(self, error: Exception, entered: Sequence[str]) -> bool:
        if not (isinstance(error, DATA_DEPENDENT) and self.widen(entered)):
            return False
        if isinstance(error, BranchesOnData):  # what the module asked is not asked any more
            self.branch_paths = ()
            self._branching.clear()
            self._refuted.clear()
        return True

    def made(self, runs: Sequence[Run]) -> list[Run]:
        """Return the runs to make, one per branch path. `runs` may be a prefix of all runs."""
        self._modes = [run.training for run in runs]
        self.branch_paths = self.branch_paths or tuple((i, ()) for i in range(len(runs)))
        return [runs[i]._replace(answers=a) for i, a in self.branch_paths if i < len(runs)]

    def widen(self, entered: Sequence[str]) -> bool:
        """Make the innermost module in `entered` that is still traced opaque, with others like it.

        Modules are alike if they have the same class and the same name apart from block numbers.
        Returns False if that module is `root` itself.
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
        """Return an opaque module with a submodule in `called`, preceded by the modules around it.

        A plan may reshard inputs and outputs of such a submodule, which would affect its calls
        inside of the opaque module. Returns an empty list if there is none.
        """
        seen = {id(self.root.get_submodule(name)) for name in called}
        for name in self.alike:
            parts = name.split(".")
            _, *within = self.root.get_submodule(name).modules()
            if not seen.isdisjoint(map(id, within)):
                return [".".join(parts[: i + 1]) for i in range(len(parts))]
        return []

    @contextmanager
    def standing_in(self, root: nn.Module, make: Make, known: KnownValues) -> Iterator[None]:
        """Replace calls of these modules in `root` (maybe a copy) by `make`, within the context.

        `known` has the values of tensors that are known.
        """
        with ExitStack() as undo:
            for name in self.alike:
                module = root.get_submodule(name)
                undo.callback(put_instead(module, self._forward(name, module, make, known)))
            yield

    def _forward(
        self, name: str, module: nn.Module, make: Make, known: KnownValues
    ) -> Callable[..., Any]:
        @wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs), is_leaf=is_own)
            objects = Objects([v for v in leaves if is_own(v)])
            said = tuple(Object if is_own(v) else stated(v, known.value) for v in leaves)
            given = Given(said, objects.described(stated))
            result = self._result(self.alike[name], given, spec, objects, module.training)
            if result.stateful:
                self.stateful.add(name)
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
        """Return the outcome of a call of module `name` in a mode; outcomes are cached.

        Raises:
            NeedsData: the outcome depends on data, or the module has other side effects.
        """
        key = name, given, str(spec), training
        if key not in self._known:
            with in_mode(self._copies[name], training):
                self._known[key] = outcome(name, self._copies[name], given, spec, objects)
        return self._known[key]
