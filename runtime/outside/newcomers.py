"""Modules that come into a split model in the place of others: they take and give whole tensors.

An adapter around a layer, say, or another activation. In a forward pass of the model what is given
to a module in that place lies as the plan has it; one that the plan does not know is given it
whole, value and gradient, and what it gives is cut again (as hooks see and give it, `shown.py`).
What it calls of the split model is called by itself (`alone.py`). So whatever its code does, ranks
do alike, and its parameters are plain tensors, whole on each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.runtime.communication import facts
from shardwright.runtime.outside.hooks import Hooked, is_inside, see_whole
from shardwright.runtime.outside.originals import TakesOriginals
from shardwright.runtime.outside.unchanged import Unchanged
from shardwright.runtime.subclasses import subclass
from shardwright.runtime.tensors.buffers import local_buffers

NEWCOMER = "_shardwright_newcomer"
"""Where such a module keeps what is known of its place."""

WITHIN = "_shardwright_within"
"""Where a module of the split model within such a one keeps the same."""

WRAPPERS = ("torch.distributed.", "torch._dynamo.")
"""Packages whose modules wrap others, and give on what they are given: checkpointing, compiling."""


class Newcomer:
    """Mixin in front of the class of a module that came in the place of another."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, on whole tensors.

        Raises:
            UsageError: it is compiled, or it is not known how tensors lie in this place.
        """
        return on_whole(getattr(self, NEWCOMER), super().forward, args, kwargs)  # type: ignore[misc]


def on_whole(place: Unchanged, code: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `code` gives in a `place` where it knows of no parts: it takes and gives whole tensors.

    Raises:
        UsageError: it is compiled, or it is not known how tensors lie in this place.
    """
    if not is_inside(place):
        return code(*args, **kwargs)
    if torch.compiler.is_compiling():
        raise UsageError(
            f"'{place.path}' came into the model after it was split, and torch.compile cannot "
            "make of it what it is: change the model before it is split, or do not compile it"
        )
    running, shown = place.running, place.shown
    if shown is not None:
        shown.check()
        args, kwargs = shown.whole(args, kwargs)
    outer, running.now, place.hides = running.now, False, True
    try:
        with place.caches.closed(args, kwargs):
            output = code(*args, **kwargs)
    finally:
        running.now, place.hides = outer, False
    return output if shown is None else shown.cut_output(output)


class Within:
    """Mixin in front of a module of the split model that a newcomer calls."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, which sees what is in caches that are hidden around it."""
        place: Unchanged = getattr(self, WITHIN)
        if not place.hides:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with place.caches.opened(*args, *kwargs.values()):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def welcome(new: nn.Module, old: nn.Module | None, calls: Any, name: str) -> None:
    """Let `new`, which is about to come in the place of `old`, see whole tensors there.

    What is of the split model, or only wraps it, stays as it is. Of a list of modules each member
    comes in the place of the one of that name.

    Raises:
        UsageError: it is in another place, too, or has a forward that is not its class's.
    """
    of_model = vars(new).get("_shardwright_calls") is calls
    if old is None or new is old or of_model or type(new).__module__.startswith(WRAPPERS):
        return
    if type(new).forward is nn.Module.forward:
        for key, child in new._modules.items():
            if child is not None:
                welcome(child, old._modules.get(key), calls, f"{name}.{key}")
        return
    if NEWCOMER in vars(new):
        raise UsageError(
            f"the {type(new).__name__} that comes in the place of '{name}' is in the model "
            f"already, as '{getattr(new, NEWCOMER).path}': put in a copy of it"
        )
    if "forward" in vars(new):
        raise UsageError(
            f"the forward of what comes in the place of '{name}' was replaced on the instance: put "
            "it into a class of its own"
        )
    place = place_of(old, calls, name)
    vars(new).update({NEWCOMER: place, "_shardwright_unchanged": place})
    bases = [Newcomer]
    bases += [TakesOriginals] if place.originals is not None else []
    bases += [] if isinstance(new, Hooked) else [Hooked]
    new.__class__ = subclass(type(new), *bases)
    see_whole(new)
    hides_within(new, place, calls)


def hides_within(new: nn.Module, place: Unchanged, calls: Any) -> None:
    """Let modules of the split model within `new` see in caches what is hidden from that.

    Whence they were called until now says nothing of what a backward pass runs again.
    """
    for module in new.modules():
        state = vars(module).get("_shardwright")
        known: Any = vars(module).get("_shardwright_unchanged") if state is None else state.alone
        if known is not None:
            known.inside = known.called = False
    for module in _of_model(new, calls):
        vars(module)[WITHIN] = place
        if not isinstance(module, Within):
            module.__class__ = subclass(type(module), Within)


def _of_model(new: nn.Module, calls: Any) -> Iterator[nn.Module]:
    """The outermost modules in `new` that are of the split model, and have code."""
    for child in new.children():
        own = vars(child).get("_shardwright_calls") is calls
        if own and type(child).forward is not nn.Module.forward:
            yield child
        else:
            yield from _of_model(child, calls)


def taken_in(outer: nn.Module, layer: nn.Linear) -> None:
    """Let `outer`, a new module around a `layer` of a split model, know its whole sizes.

    peft asks for them by a method of its own, which takes a DTensor for what a layer computes with.
    """
    if hasattr(type(outer), "_get_in_out_features"):
        vars(outer)["_get_in_out_features"] = _sizes


def _sizes(layer: nn.Linear) -> tuple[int, int]:
    return layer.in_features, layer.out_features


def place_of(old: nn.Module, calls: Any, name: str) -> Unchanged:
    """What is known of the place of `old`."""
    known, state = vars(old).get("_shardwright_unchanged"), vars(old).get("_shardwright")
    if known is not None:
        place = copy.copy(known)
        place.inside = place.called = False
        return place
    if state is None:
        place = Unchanged(type(old).forward, True, name)
        place.running = calls.running
        return place
    alone = state.alone
    place = Unchanged(alone.forward, alone.leaf, state.path, alone.spec, state.mesh)
    place.running, place.caches = state.running, state.caches
    place.originals = state.originals if state.goes_back else None
    return place


def newcomers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those in `model`, by name."""
    return ((path, m) for path, m in model.named_modules() if NEWCOMER in vars(m))


def fitted(new: nn.Parameter, stored: DTensor, calls: Any, name: str) -> nn.Parameter:
    """What is kept where `new` is put in the place of the parameter `stored`: its part of a whole.

    One of another shape is kept as it is.

    Raises:
        UsageError: `new` is a DTensor that lies otherwise, or has hooks.
    """
    if isinstance(new, DTensor):
        alike = new.device_mesh.mesh_dim_names == stored.device_mesh.mesh_dim_names
        if not alike or new.shape != stored.shape or new.placements != stored.placements:
            raise UsageError(
                f"the parameter '{name}' is to be replaced by a DTensor that lies otherwise over "
                "the ranks: put in a whole one (.full_tensor())"
            )
        return new
    if new.shape != stored.shape:
        return new
    if new._backward_hooks or getattr(new, "_post_accumulate_grad_hooks", None):
        raise UsageError(
            f"the parameter '{name}' is to be replaced by one with hooks, of which each rank keeps "
            "a part: put them on what is kept, which is the module's own then"
        )
    calls.arrived.append(facts.of_tensors([(name, new)]))
    part: Any = calls.cut(new.detach(), stored, name).detach().requires_grad_(new.requires_grad)
    part._is_param = True  # as in `distributed`
    vars(part).update(vars(new))
    new._shardwright_cut = True  # type: ignore[attr-defined]
    return part


def of_newcomers(model: nn.Module) -> set[int]:
    """The ids of the parameters of newcomers."""
    return {id(p) for _, module in newcomers(model) for p in module.parameters()}


def values_of_newcomers(model: nn.Module) -> str:
    """A digest of what ranks must have alike of newcomers."""
    found: list[tuple[str, Tensor]] = []
    for path, module in newcomers(model):
        held = [*module.named_parameters(prefix=path), *local_buffers(module, prefix=path)]
        found += [(name, x) for name, x in held if not isinstance(x, DTensor)]
    return facts.of_tensors(found)
