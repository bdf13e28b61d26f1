"""Modules and parameters that come or go after a model was split: noticed at its next forward."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from shardwright.errors import UsageError
from shardwright.runtime.checkpoint.write import save
from shardwright.runtime.communication.facts import digest
from shardwright.runtime.communication.replicas import average_gradients
from shardwright.runtime.modules.local import placements
from shardwright.runtime.modules.root import note_members
from shardwright.runtime.modules.seen import Seeing
from shardwright.runtime.noticed.changes import MISSING
from shardwright.runtime.noticed.settings import Settings, note
from shardwright.runtime.outside.functional import as_one_function, is_transforming
from shardwright.runtime.outside.hooks import BEFORE_ALL, BEHIND_ALL, check_hooks_on_all, check_kept
from shardwright.runtime.outside.newcomers import (
    NEWCOMER,
    fitted,
    newcomers,
    of_newcomers,
    taken_in,
    values_of_newcomers,
    welcome,
)
from shardwright.runtime.ranks.agreement import agree

CHANGED = (
    "a split model was changed, and is compiled whole (fullgraph=True): call it once as it is, not "
    "compiled, which looks at what changed"
)


class Guard:
    """What a split model was made of when it was last looked at."""

    def __init__(self, model: nn.Module) -> None:
        every = dict(model.named_modules())
        self.modules = {p: m for p, m in every.items() if type(m).forward is not nn.Module.forward}
        self.classes = {path: type(m) for path, m in every.items()}
        self.settings = Settings(model)
        asked = self.settings.asked
        model._shardwright_calls.asked = asked.names | asked.in_forwards  # type: ignore[union-attr]

    def check(self, model: nn.Module) -> None:
        """Look whether what was put into the model since may stay.

        What only wraps modules of the model (checkpointing, `torch.compile`) may.

        Raises:
            UsageError: a parameter came that is not split, a module that the plan changed went, or
                an attribute is another that code may ask for.
        """
        self.settings.check(model, model._shardwright_calls.settings)  # type: ignore[union-attr]
        there, whole = set(map(id, model.modules())), of_newcomers(model)
        for path, module in self.modules.items():
            if id(module) not in there and not self._in_its_place(model, path):
                raise UsageError(
                    f"'{path}' was replaced or taken out after the model was split, and what the "
                    "plan does there went with it: change the model before it is split (adapters "
                    "that were merged: write the model with shardwright.save, and load that with a "
                    "plan for it)"
                )
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor) and id(parameter) not in whole:
                raise UsageError(
                    f"the parameter '{name}' came into the model after it was split, and no rank "
                    "knows how it lies over the ranks: add it (adapters, embeddings) before"
                )
        self._compare(model, bool(whole))

    def look(self, model: Any) -> None:
        """Check, and take all as it is then."""
        self.check(model)
        note_members(model)
        model._shardwright_calls.changed = False
        self.settings.keep(model)

    def _in_its_place(self, model: nn.Module, path: str) -> bool:
        """Whether `path` leads to what came in the place of another module, or is just like it."""
        module: Any = model
        for name in path.split("."):
            module = module._modules.get(name)
            if module is None or NEWCOMER in vars(module):
                break
        if module is None or NEWCOMER in vars(module):
            return module is not None
        return "_shardwright" not in vars(module) and type(module) is self.classes[path]

    def _compare(self, model: Any, trains: bool) -> None:
        """Look whether all ranks have what came into the model alike, and let them draw alike.

        Raises:
            DistributedError: they do not.
            UsageError: copies of the model would not average its gradients.
        """
        calls = model._shardwright_calls
        came = [*calls.arrived]
        if any(True for _ in newcomers(model)):
            if trains and calls.copies is not None:
                raise UsageError(
                    "a module with parameters came into a model after it was split, whose copies "
                    "average the gradients of those that they had: add it before"
                )
            came.append(values_of_newcomers(model))
        if len(came) > len(calls.arrived) or calls.replaced:
            model._shardwright_draws = "always"
        if came:
            groups = calls.mesh.process_groups(calls.mesh.groups)
            what = "what was put into the model after it was split (torch.manual_seed first, alike)"
            agree(
                "comparing what was put into the model", facts={what: digest(came)}, groups=groups
            )
        calls.arrived.clear()
        # What was not there when the model was split is known as such from then on.
        calls.settings[:] = [change for change in calls.settings if change.before is MISSING]


@cache
def watch_registrations() -> None:
    """From now on note which split models modules or parameters are put into.

    torch calls this for each module and parameter that is put anywhere, so that a forward need not
    look for changes.
    """

    def note_module(module: nn.Module, name: str, new: Any) -> None:
        calls = module.__dict__.get("_shardwright_calls")
        if calls is not None:
            calls.changed = True
            if new is not None and module._modules.get(name) is None:
                note(module, name, new)
            elif new is not None:
                welcome(new, module._modules[name], calls, name)
        elif isinstance(new, nn.Linear) and "_shardwright_calls" in vars(new):
            taken_in(module, new)

    def note_parameter(module: nn.Module, name: str, new: Any) -> Any:
        calls = module.__dict__.get("_shardwright_calls")
        if calls is None:
            return new
        calls.changed = True
        stored: Any = module._parameters.get(name)
        if calls.has(stored) and isinstance(new, nn.Parameter):
            new = fitted(new, stored, calls, name)
        if calls.copies is not None and calls.has(new):
            calls.copies.watch([new])
        return new

    register_module_module_registration_hook(note_module)
    register_module_parameter_registration_hook(note_parameter)


def _changed_since(model: Any) -> bool:
    """Whether what `model` keeps is not what it was: asked whenever it is compiled anew."""
    return model._shardwright_guard.settings.changed()


# What torch.compiler.assume_constant_result does, which imports all of dynamo first.
_changed_since._dynamo_marked_constant = True  # type: ignore[attr-defined]


class GuardedRoot(Seeing):
    """Mixin in front of the root of a split model."""

    _shardwright_guard: Guard

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, once it is seen to be what was split."""
        calls = self._shardwright_calls
        compiling, settings = torch.compiler.is_compiling(), self._shardwright_guard.settings
        if compiling and (calls.changed or _changed_since(self)):
            raise UsageError(CHANGED)  # on which dynamo goes on without compiling, where it may
        if not compiling and (calls.changed or settings.changed()):
            look: Any = self._shardwright_guard.look
            if "torch._dynamo" in sys.modules:
                look = torch.compiler.disable(look)
            look(self)
        if (BEFORE_ALL or BEHIND_ALL) and not compiling:
            check_hooks_on_all()
        forward = super().forward  # type: ignore[misc]
        if not compiling and is_transforming():
            forward = as_one_function(self, forward)
        running = calls.running
        outer, running.now = running.now, True
        try:
            output = forward(*args, **kwargs)
            if running.shown:
                check_kept(running)
            return output
        finally:
            running.now = outer
            running.shown = ()
            if not compiling and settings.contents.changed():
                settings.keep_contents()

    def __reduce_ex__(self, protocol: Any) -> Any:
        recipe = vars(self).get("_shardwright_recipe")
        return super().__reduce_ex__(protocol) if recipe is None else recipe.reduced(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        out = super().__deepcopy__(memo)
        if (copies := out._shardwright_calls.copies) is not None:
            average_gradients(out, copies.groups)
        return out

    def _shardwright_save_pretrained(
        self, save_directory: Any, max_shard_size: int | str = "5GB", **options: Any
    ) -> None:
        """What `shardwright.save` writes; all ranks call it.

        Raises:
            UsageError: an option that is not about how it is written.
        """
        for name, value in options.items():
            if name not in ("is_main_process", "safe_serialization") and value:
                raise UsageError(f"save_pretrained({name}=...) of a split model: leave it out")
        model: Any = self
        mesh = self._shardwright_calls.mesh
        save(model, save_directory, placements(model), mesh, max_shard_size=max_shard_size)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Nobody but DDP asks for it, and torch.jit, which asks for all attributes."""
        if sys._getframe(1).f_globals.get("__name__") != DistributedDataParallel.__module__:
            raise UsageError(
                "torch.jit cannot see what ranks send each other, so it takes no split model: use "
                "torch.compile or torch.export"
            )
        raise UsageError(
            "DistributedDataParallel takes the parts of a split model for copies of the whole: "
            "plan with a mesh (mesh={'dp': 2, 'tp': 2}), whose copies average their gradients by "
            "themselves, or use torch's fully_shard over the other ranks"
        )
