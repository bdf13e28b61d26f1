"""The root of a split model: what holds for a whole forward pass.

It tells the head when a loss is wanted, seals what was left split for it, begins to note lengths
anew, and refuses to give what each rank has a part of only: attention weights, and hidden states
that are split along the sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.contract.names import slot_pattern
from shardwright.planner.contract.plan_file import TracedCall
from shardwright.runtime.alone import Running
from shardwright.runtime.classes import like
from shardwright.runtime.lengths import Lengths
from shardwright.runtime.slots import is_own, leaves, positions, returned
from shardwright.runtime.split_logits import LossScope, Seal

ROOT_CLASSES: dict[type, type] = {}


class RootModule:
    """Mixin in front of the root's own class."""

    config: Any
    _shardwright_scope: LossScope
    _shardwright_lengths: Lengths
    _shardwright_positions: dict[str, int]
    _shardwright_running: Running
    _shardwright_proven: frozenset[str]
    _shardwright_given_before: frozenset[str]
    _shardwright_arguments: frozenset[str]
    _shardwright_named: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; with labels, logits stay split until it returns.

        Raises:
            UsageError: attention weights are asked for, or hidden states that are split.
        """
        lengths = self._shardwright_lengths
        if lengths.axes and self._shardwright_wanted("output_hidden_states", args, kwargs):
            raise UsageError(
                "output_hidden_states=True on a sequence-parallel model: each rank holds its own "
                "part of the sequence: plan without sequence_parallel to get them whole"
            )
        if self._shardwright_wanted("output_attentions", args, kwargs):
            raise UsageError(
                "output_attentions=True on a split model: each rank computes the attention weights "
                "of its own heads, never those of all: take them from the unsplit model"
            )
        as_tuple = False
        if self._shardwright_proven:
            self._shardwright_check_given(args, kwargs)
            if self._shardwright_named:
                args, kwargs, as_tuple = self._shardwright_by_name(args, kwargs)
        scope, outer = self._shardwright_scope, self._shardwright_scope.seal
        labels = self._shardwright_given("labels", args, kwargs)
        # Dynamo takes nn.CrossEntropyLoss for its own business and wants a tensor: gather, then.
        whole = labels is None or (torch.compiler.is_compiling() and not scope.traceable)
        scope.seal = seal = None if whole else Seal()
        try:
            along = lengths.forward() if lengths.axes else nullcontext()
            with self._shardwright_running.forward(), along:
                output = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            scope.seal = outer
            if seal is not None:
                seal.closed = True
        if self._shardwright_proven:
            self._shardwright_check(output)
        return output.to_tuple() if as_tuple else output

    def _shardwright_check_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise UsageError if something comes in that was given in no call that was traced."""
        names = (*self._shardwright_positions, *(f"*{n}" for n in range(len(args))))
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name in self._shardwright_given_before or value is None or is_own(value):
                continue
            if any(isinstance(x, Tensor) and x.is_floating_point() for _, x in leaves(value)):
                raise UsageError(
                    f"argument '{name}' of {type(self).__name__} was given in no call that the "
                    "plan was made for, so parts may be joined with what is whole: plan with "
                    "example inputs (kwargs) that have it"
                )

    def _shardwright_check(self, output: Any) -> None:
        """Raise UsageError if something leaves that was given out in no call that was traced."""
        for slot, leaf in returned(output, self._shardwright_arguments):
            if slot_pattern(slot) not in self._shardwright_proven or not isinstance(leaf, Tensor):
                raise UsageError(
                    f"output '{slot}' of {type(self).__name__} was given in no call that the plan "
                    "was made for, so a rank may have a part of it or of its gradient: plan with "
                    "example inputs (kwargs) with which the model gives it"
                )

    def _shardwright_by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """The call with named outputs, and whether a tuple was asked for."""
        wanted = self._shardwright_given("return_dict", args, kwargs)
        if wanted is None:
            wanted = getattr(getattr(self, "config", None), "return_dict", True)
        if wanted:
            return args, kwargs, False
        at = self._shardwright_positions.get("return_dict", len(args))
        if at < len(args):
            return (*args[:at], True, *args[at + 1 :]), kwargs, True
        return args, {**kwargs, "return_dict": True}, True

    def _shardwright_wanted(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call, or else the config, asks for the output that `name` switches on."""
        wanted = self._shardwright_given(name, args, kwargs)
        if wanted is None:
            wanted = getattr(getattr(self, "config", None), name, None)
        return bool(wanted)

    def _shardwright_given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument `name` of this call; None if there is none."""
        at = self._shardwright_positions.get(name)
        return args[at] if at is not None and at < len(args) else kwargs.get(name)


def wrap_root(
    model: nn.Module, lengths: Lengths | None = None, calls: Sequence[TracedCall] = ()
) -> None:
    """Make `model` the root of its split modules, in place; after the last `apply_module`.

    `lengths` are those that `apply_module` was given, `calls` those that the plan is proven for; a
    plan of an older version does not say. A model of which nothing is split stays as it is.
    """
    if isinstance(model, RootModule):
        return
    states = [m.__dict__.get("_shardwright") for m in model.modules()]
    heads = [s for s in states if s is not None and any(c.head for c in s.outputs)]
    lengths = lengths or Lengths()
    if not any(states):
        return
    running = Running()
    for state in states:
        if state is not None:
            state.running = running
    original = type(model)
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    scope = LossScope(traceable=code is None or "CrossEntropyLoss" not in code.co_names)
    for state in heads:
        state.scope = scope
    model._shardwright_scope = scope  # type: ignore[assignment]
    model._shardwright_lengths = lengths  # type: ignore[assignment]
    model._shardwright_running = running  # type: ignore[assignment]
    proven = frozenset(slot for call in calls if not call.module for slot in call.outputs)
    parameters = inspect.signature(original.forward).parameters
    parts = any(call.module for call in calls)  # what they give is joined by code not traced
    model._shardwright_proven = frozenset() if parts else proven  # type: ignore[assignment]
    given = frozenset(name for call in calls for name in call.inputs)
    model._shardwright_given_before = given  # type: ignore[assignment]
    model._shardwright_arguments = frozenset(parameters)  # type: ignore[assignment]
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    model._shardwright_named = bool(  # type: ignore[assignment]
        ("return_dict" in parameters or takes_more)
        and hasattr(getattr(model, "config", None), "return_dict")
        and not any(slot[:1].isdigit() for slot in proven)
    )
    model._shardwright_positions, _ = positions(original.forward)  # type: ignore[assignment]
    if original not in ROOT_CLASSES:
        # The same name: checkpoints and configs record it as the architecture.
        ROOT_CLASSES[original] = type(
            original.__name__,
            (RootModule, original),
            {
                "forward": like(original, RootModule.forward),
                "__doc__": original.__doc__,
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
            },
        )
    model.__class__ = ROOT_CLASSES[original]
