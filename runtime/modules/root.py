"""The root of a split model: what holds for a whole forward pass.

It tells the head when a loss is wanted, seals what was left split for it, begins to note lengths
anew, and refuses to give what each rank has a part of only: attention weights, and hidden states
that are split along the sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import TracedCall
from shardwright.runtime.calls.caches import Caches
from shardwright.runtime.calls.filled import check_filled, may_be_filled
from shardwright.runtime.calls.proven import Proven
from shardwright.runtime.communication.generators import (
    any_trains,
    draw_alike_alone,
    draw_as_first,
)
from shardwright.runtime.logits.split_logits import LossScope, Seal
from shardwright.runtime.outside.unchanged import watch_unchanged
from shardwright.runtime.redistribution.lengths import Lengths
from shardwright.runtime.running import Running
from shardwright.runtime.slots import positions
from shardwright.runtime.subclasses import like, subclass_with

ROOT_CLASSES: dict[type, type] = {}


class RootModule:
    """Mixin in front of the root's own class."""

    config: Any
    _shardwright_scope: LossScope
    _shardwright_lengths: Lengths
    _shardwright_positions: dict[str, int]
    _shardwright_running: Running
    _shardwright_caches: Caches
    _shardwright_proven: Proven | None
    _shardwright_members: list[nn.Module]
    _shardwright_draws: str
    """When random numbers are drawn, as calls of a plan have it."""
    _shardwright_mesh: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward; with labels, logits stay split until it returns.

        Raises:
            UsageError: attention weights are asked for, or hidden states that are split.
        """
        given = dict(zip(self._shardwright_positions, args, strict=False), **kwargs)
        lengths = self._shardwright_lengths
        if lengths.axes and self._shardwright_wanted("output_hidden_states", given):
            raise UsageError(
                "output_hidden_states=True on a model that splits sequences: each rank holds its "
                "own part: plan without sequence_parallel or cp to get them whole"
            )
        if self._shardwright_wanted("output_attentions", given):
            raise UsageError(
                "output_attentions=True on a split model: each rank computes the attention weights "
                "of its own heads, never those of all: take them from the unsplit model"
            )
        as_tuple, proven = False, self._shardwright_proven
        compiling = torch.compiler.is_compiling()
        known = proven is not None and proven.check_given(args, kwargs)
        if proven is not None:
            proven.check_modes(self._shardwright_members)
        if proven is not None and proven.named:
            args, kwargs, as_tuple = self._shardwright_by_name(args, kwargs, given)
        scope, outer = self._shardwright_scope, self._shardwright_scope.seal
        labels = given.get("labels")
        # Dynamo takes nn.CrossEntropyLoss for its own business and wants a tensor: gather, then.
        whole = labels is None or (compiling and not scope.traceable)
        scope.seal = seal = None if whole else Seal()
        draws: Any = self._shardwright_draws
        draws = draws == "always" or (draws and any_trains(self._shardwright_members))
        if draws and not compiling:
            self._shardwright_draw_alike()
        running, caches = self._shardwright_running, self._shardwright_caches
        within, running.now = running.now, True
        filled = [] if compiling else may_be_filled(given, caches.names)
        try:
            takes = () if proven is None else proven.arguments  # what no plan proves is not hidden
            if not (lengths.axes or caches.names):
                output = super().forward(*args, **kwargs)  # type: ignore[misc]
                if not compiling:
                    for cache in caches.among(output, takes):
                        caches.hide(cache)
            else:
                with caches.open(map(given.get, caches.names), compiling) as left:
                    if lengths.axes:
                        with lengths.forward():
                            output = super().forward(*args, **kwargs)  # type: ignore[misc]
                    else:
                        output = super().forward(*args, **kwargs)  # type: ignore[misc]
                    if left is not None:
                        left += caches.among(output, takes)
        finally:
            running.now = within
            scope.seal = outer
            if seal is not None:
                seal.closed = True
        if filled and proven is not None:
            check_filled(filled, output)
        if proven is not None and known:
            proven.check_output(output)
        return output.to_tuple() if as_tuple and hasattr(output, "to_tuple") else output

    def _shardwright_by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """The call with named outputs, and whether a tuple was asked for."""
        wanted = given.get("return_dict")
        if wanted is None:
            wanted = getattr(getattr(self, "config", None), "return_dict", True)
        if wanted:
            return args, kwargs, False
        at = self._shardwright_positions.get("return_dict", len(args))
        if at < len(args):
            return (*args[:at], True, *args[at + 1 :]), kwargs, True
        return args, {**kwargs, "return_dict": True}, True

    def _shardwright_draw_alike(self) -> None:
        """Put the generators of all ranks that share the model where that of the first stands."""
        if self._shardwright_mesh is not None:
            draw_as_first(self, self._shardwright_mesh)  # type: ignore[arg-type]

    def _shardwright_wanted(self, name: str, given: dict[str, Any]) -> bool:
        """Whether a call, or else the config, asks for the output that `name` switches on."""
        wanted = given.get(name)
        if wanted is None:
            wanted = getattr(getattr(self, "config", None), name, None)
        return bool(wanted)


def note_members(model: nn.Module) -> None:
    """Keep a list of the modules of a split `model`: to walk over them takes long.

    It is made anew when modules were put into the model.
    """
    model._shardwright_members = list(model.modules())  # type: ignore[assignment]


def _generate(original: Any) -> Callable[..., Any]:
    @functools.wraps(original.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._shardwright_draw_alike()  # ranks that sample take the same tokens
        return original.generate(self, *args, **kwargs)

    return generate


def wrap_root(
    model: nn.Module, lengths: Lengths | None = None, calls: Sequence[TracedCall] | None = None
) -> None:
    """Make `model` the root of its split modules, in place; after the last `apply_module`.

    `lengths` are those that `apply_module` was given, `calls` those that the plan is proven for; by
    default any. A model of which nothing is split stays as it is.
    """
    if isinstance(model, RootModule):
        return
    states = [m.__dict__.get("_shardwright") for m in model.modules()]
    heads = [s for s in states if s is not None and any(c.head for c in s.outputs)]
    lengths = lengths or Lengths()
    if not any(states):
        return
    running = Running()
    caches = Caches({name for call in calls or () for name in call.state})
    proven = None if calls is None else Proven.of(model, calls)
    for module in list(model.modules()) if caches.names else ():
        if module is not model and "_shardwright" not in module.__dict__:
            watch_unchanged(module)
    for module in model.modules():
        if (unchanged := module.__dict__.get("_shardwright_unchanged")) is not None:
            unchanged.running, unchanged.caches = running, caches
    for state in states:
        if state is not None:
            state.running, state.caches = running, caches
            if state.alone is not None:
                state.alone.proven = proven
    original = type(model)
    code = getattr(inspect.unwrap(original.forward), "__code__", None)
    scope = LossScope(traceable=code is None or "CrossEntropyLoss" not in code.co_names)
    for state in heads:
        state.scope = scope
    model._shardwright_scope = scope  # type: ignore[assignment]
    model._shardwright_lengths = lengths  # type: ignore[assignment]
    model._shardwright_running = running  # type: ignore[assignment]
    model._shardwright_caches = caches  # type: ignore[assignment]
    model._shardwright_proven = proven  # type: ignore[assignment]
    note_members(model)
    drawn = {call.draws for call in calls or ()} - {""}
    model._shardwright_draws = "always" if "always" in drawn else "".join(drawn)  # type: ignore[assignment]
    if drawn:
        draw_alike_alone(model, running, "always" in drawn)
    for module in model.modules() if "always" in drawn else ():
        if "_shardwright_parts" in vars(module):
            module._shardwright_always = True  # type: ignore[assignment]
    model._shardwright_positions, _ = positions(original.forward)  # type: ignore[assignment]
    if original not in ROOT_CLASSES:
        # The same name: checkpoints and configs record it as the architecture.
        members = {"forward": like(original, RootModule.forward)}
        if callable(getattr(original, "generate", None)):
            members["generate"] = _generate(original)
        ROOT_CLASSES[original] = subclass_with(original, members, RootModule)
    model.__class__ = ROOT_CLASSES[original]
