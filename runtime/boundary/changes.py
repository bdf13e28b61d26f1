"""Detects changes to a model after it was split: supports them with full tensors, or refuses them.

With a changed value, code may take a path that no traced call took. Each module notes attributes
that are set on it outside of calls, and the root checks them at its next call. Nothing reports
changes to classes and to configs, lists and other kept objects (`kept_objects.py`): the root
compares them at each call. Attributes that the model's own code sets during a call are ignored.

A module that replaces another (an adapter around a layer) is given full tensors. Its parameters
are full on each rank, and it calls modules of the split model directly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from operator import ne
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from shardwright.errors import UsageError
from shardwright.planner.contract.names import PAGING
from shardwright.planner.contract.plain_values import is_plain
from shardwright.runtime.boundary.hooks import wrap_hooks
from shardwright.runtime.boundary.kept_objects import (
    KeptObject,
    KeptObjects,
    kept_objects,
    snapshot,
)
from shardwright.runtime.boundary.model_boundary import ModelBoundary
from shardwright.runtime.boundary.module_boundary import ModuleBoundary, boundary_of
from shardwright.runtime.boundary.module_class import LocalModule, put_class
from shardwright.runtime.code.attributes import PREFIX
from shardwright.runtime.code.model_objects import has_forward, is_config, may_change
from shardwright.runtime.code.names_in_code import ReadNames, is_of_framework
from shardwright.runtime.communication import facts
from shardwright.runtime.ranks.agreement import agree
from shardwright.runtime.tensors.parameters import mark_replaced

IN_TURN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers whose forward may run any module in them, whatever its name."""

WRAPPERS = ("torch.distributed.", "torch._dynamo.")
"""Packages whose modules only wrap others and pass tensors on: checkpointing, compiling."""

CHANGED = (
    "a split model was changed, and is compiled with fullgraph=True: call it once uncompiled, "
    "which checks the changes"
)


class MISSING:
    """Marks an attribute that does not exist."""


class Setting(NamedTuple):
    """An attribute that was set, and its value before that."""

    module: nn.Module
    name: str
    before: Any


class ChangeDetection:
    """The state of a split model at its last check, and the changes since.

    Attributes:
        changed: Whether the root must check the model at its next call.
        switching: Whether `train()` or `eval()` is running.
        settings: Attributes of modules that were set since the model was split.
        started: Attributes that the model's own code set in calls, with their values before that.
        arrived: Digests of full parameters that were put into the model since its last check.
    """

    def __init__(self, model: ModelBoundary) -> None:
        root = model.root
        self.model = model
        self.changed = self.switching = False
        self.settings: list[Setting] = []
        self.started: dict[tuple[str, str], Any] = {}
        self.arrived: list[str] = []
        every = dict(root.named_modules())
        self.modules = {p: m for p, m in every.items() if has_forward(m)}
        self.classes = {path: type(m) for path, m in every.items()}
        self.read_names = ReadNames(root)
        self.kept = KeptObjects(kept_objects(root, self._is_read))
        own = dict.fromkeys(self.classes.values())
        found = dict.fromkeys(kind for one in own for kind in one.__mro__)
        self.kinds = [kind for kind in found if kind in own or not is_of_framework(kind)]
        self.members = [vars(kind) for kind in self.kinds]
        self.had_members = [snapshot(members) for members in self.members]

    # --- attributes, parameters and modules that are set

    def note(self, module: nn.Module, name: str, value: Any) -> None:
        """Note that an attribute of a module is set, unless the model's own code sets it."""
        if torch.compiler.is_compiling() or may_change(name) or name.startswith(PREFIX):
            return
        before = _now(module, name)
        if isinstance(before, (Tensor, nn.Module)):
            self.changed = True
            return
        asked = name in self.read_names.names or name in self.read_names.in_forwards
        plain = is_plain(value) or value is MISSING or isinstance(module, IN_TURN)
        call = self.model.call
        if call.active and (state := boundary_of(module)) is not None:
            self.started.setdefault((state.path, name), before)
        if not (plain or asked) or self.switching or call.active or call.full:
            return
        new = (s for s in self.settings if s.before is MISSING and s.module is module)
        came = any(setting.name == name for setting in new)
        if not came:
            self.settings.append(Setting(module, name, before))
            came = before is MISSING
        if not came or asked or isinstance(module, IN_TURN):
            self.changed = True  # else no code reads it: torch.compile leaves such attributes

    def note_deleted(self, module: nn.Module, name: str) -> None:
        """Note that an attribute of a module is deleted."""
        self.note(module, name, MISSING)

    def set_forward(self, module: Any, forward: Any) -> None:
        """Replace the `forward` of the root on the instance: it is called with full tensors.

        Setting a module's own `forward` again removes the replacement.

        Raises:
            UsageError: `forward` is another one, and the module is not the root.
        """
        own = isinstance(forward, MethodType) and forward.__self__ is module
        own = own and forward.__func__ is type(module).forward  # pyright: ignore
        if not own and module is not self.model.root:
            raise UsageError(
                f"a forward is put on '{module._shardwright.path}' after the model was split, and "
                "would see parts of tensors: put it on before the model is planned and split, or "
                "put a module of your own in its place"
            )
        vars(module).pop("forward", None)
        if not own:
            vars(module)["forward"] = forward

    def set_parameter(self, module: nn.Module, name: str, new: Any) -> Any:
        """Return what to store when `new` is registered as the parameter `name`.

        For a full parameter this is its shard. A parameter of another shape is stored as it is.

        Raises:
            UsageError: `new` is a DTensor with other placements, or has hooks.
        """
        self.changed = True
        stored: Any = module._parameters.get(name)
        if self.model.has(stored) and isinstance(new, nn.Parameter):
            new = self._fitted(new, stored, name)
        if self.model.copies is not None and self.model.has(new):
            self.model.copies.watch([new])
        return new

    def _fitted(self, new: nn.Parameter, stored: DTensor, name: str) -> nn.Parameter:
        if isinstance(new, DTensor):
            alike = new.device_mesh.mesh_dim_names == stored.device_mesh.mesh_dim_names
            if not alike or new.shape != stored._spec.shape or new.placements != stored.placements:
                raise UsageError(
                    f"the parameter '{name}' is to be replaced by a DTensor with other "
                    "placements: put in the full tensor (.full_tensor())"
                )
            return new
        if new.shape != stored._spec.shape:
            return new
        if new._backward_hooks or getattr(new, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"the new parameter '{name}' has hooks, but the module keeps only a shard of it, "
                "without them: assign it without hooks, then put them on the module's parameter"
            )
        self.arrived.append(facts.of_tensors([(name, new)]))
        part: Any = self.model.cut(new.detach(), stored, name)
        part = part.detach().requires_grad_(new.requires_grad)
        part._is_param = True  # as in `split_parameters`
        vars(part).update(vars(new))
        mark_replaced(new)
        return part

    def set_module(self, parent: nn.Module, name: str, new: nn.Module | None) -> None:
        """Note that `new` is put into `parent`. If it replaces a module, it sees full tensors.

        Raises:
            UsageError: `new` is already in a split model, or its forward was replaced on the
                instance.
        """
        self.changed = True
        old = parent._modules.get(name)
        if new is not None and old is None:
            self.note(parent, name, new)
        elif new is not None and old is not None:
            place = boundary_of(old)
            if self.model.call.active and place is not None and place.spec is None:
                # The model's own code. While it was traced, the new module's ops were `parent`'s.
                self.modules.pop(place.path, None)
            else:
                self._replace(old, new, name)

    def _replace(self, old: nn.Module, new: nn.Module, name: str) -> None:
        """Let `new` see full tensors in the place of `old`. Wrappers stay as they are.

        For a container without a forward, each member replaces the member of the same name.
        """
        state = boundary_of(new)
        of_model = state is not None and state.model is self.model and not state.computes_with_full
        if new is old or of_model or type(new).__module__.startswith(WRAPPERS):
            return
        if not has_forward(new):
            for key, child in new._modules.items():
                if child is not None and old._modules.get(key) is not None:
                    self._replace(old._modules[key], child, f"{name}.{key}")  # type: ignore[arg-type]
            return
        if state is not None:
            raise UsageError(
                f"the {type(new).__name__} that comes in the place of '{name}' is in the model "
                f"already, as '{state.path}': put in a copy of it"
            )
        if "forward" in vars(new):
            raise UsageError(
                f"the forward of what comes in the place of '{name}' was replaced on the instance: "
                "put it into a class of its own"
            )
        place = boundary_of(old)
        if place is None:
            return
        if type(new).__module__.startswith("peft.") and isinstance(old, nn.Linear):
            _check_full_sizes(new, old, place.path)
        state = ModuleBoundary(place.mesh, new, place.path, place.spec)
        state.take_place_of(place)
        put_class(new, state, LocalModule, type(new), named=type(new))
        wrap_hooks(new)
        for within in new.modules():  # earlier calls do not say what a backward pass repeats
            if (inner := boundary_of(within)) is not None:
                inner.was_planned = inner.was_direct = False

    # --- checked by the root

    def differs(self) -> bool:
        """Whether a class or an object that the model keeps has changed."""
        with suppress(RuntimeError):  # a class has another tensor
            return any(map(ne, self.members, self.had_members)) or self.kept.changed()
        return True

    def keep_own(self) -> None:
        """Accept what the model's own code changed in a call.

        Configs are compared with their new content from now on; other objects
        that changed are no longer compared.
        """
        every = self.kept.every
        known = (o for o in every if is_config(o.kept) or not KeptObjects([o]).changed())
        self.kept = KeptObjects(o._replace(before=snapshot(o.now)) for o in known)

    def check_and_accept(self) -> None:
        """Check that all changes to the model are supported, and accept them.

        Raises:
            UsageError: a change is not, and code may do something that is not proven.
            DistributedError: ranks put different things into the model.
        """
        model, root = self.model, self.model.root
        self._check_settings()
        replaced = [(p, m) for p, m in root.named_modules() if _is_replacement(m)]
        self._check_modules(replaced)
        self._compare_ranks(replaced)
        model.modules[:] = root.modules()
        self.changed = False
        self.kept = KeptObjects(kept_objects(root, self._is_read))
        self.had_members[:] = map(snapshot, self.members)

    def _check_settings(self) -> None:
        first: dict[tuple[int, str], Setting] = {}
        if next(self._left_by_calls(), None) is None:
            self.settings[:] = [s for s in self.settings if not self._is_state(s.module, s.name)]
        for setting in self.settings:
            first.setdefault((id(setting.module), setting.name), setting)
        for module, name, before in first.values():
            now = _now(module, name)
            drops = isinstance(module, _DropoutNd) and name == "p"
            runs = isinstance(module, IN_TURN) and isinstance(now, nn.Module)
            if runs or (not (drops and now == 0) and self._matters(name, before, now)):
                path = next((n for n, m in self.model.root.named_modules() if m is module), "")
                left = self._left_by_calls() if self._is_state(module, name) else ()
                raise _refused(f"{path}.{name}".lstrip("."), before, now, left)
        for kept in self.kept.every:
            self._check_kept(kept)
        for kind, members, before in zip(self.kinds, self.members, self.had_members, strict=True):
            for name, was, is_now in _changed_entries(before, members):
                if name == "forward" or (not may_change(name) and self._matters(name, was, is_now)):
                    raise _refused(f"{name}' of the class '{kind.__name__}", was, is_now)

    def _is_state(self, module: nn.Module, name: str) -> bool:
        """Whether the model's own code sets the attribute, too."""
        state = boundary_of(module)
        return state is not None and (state.path, name) in self.started

    def _left_by_calls(self) -> Iterator[str]:
        """The attributes that the model's own code set, and that are not as before its calls."""
        for (path, name), before in self.started.items():
            if _are_different(before, _now(self.model.root.get_submodule(path), name)):
                yield f"{path}.{name}".lstrip(".")

    def _check_kept(self, kept: KeptObject) -> None:
        before, now = kept.before, kept.now
        if now is kept.kept:
            if _are_different(before, now):
                raise _refused(kept.path, before, now)
            return
        for name, was, is_now in _changed_entries(before, now):
            known = is_config(kept.kept) or self._is_read(name)
            if known and not may_change(name) and self._matters(name, was, is_now):
                raise _refused(f"{kept.path}.{name.removesuffix('_internal')}", was, is_now)

    def _check_modules(self, replaced: list[tuple[str, nn.Module]]) -> None:
        """Refuse modules that were removed and parameters that were added.

        Wrappers around modules of the model (checkpointing, `torch.compile`) are allowed.
        """
        root = self.model.root
        there = set(map(id, root.modules()))
        for path, module in self.modules.items():
            if id(module) not in there and not self._is_in_its_place(path):
                raise UsageError(
                    f"'{path}' was replaced or removed after the model was split, so the plan can "
                    "no longer be carried out there: change the model before it is split (adapters "
                    "that were merged: write the model with shardwright.save, and load that with a "
                    "plan for it)"
                )
        full = {id(p) for _, module in replaced for p in module.parameters()}
        for name, parameter in root.named_parameters():
            if not isinstance(parameter, DTensor) and id(parameter) not in full:
                raise UsageError(
                    f"the parameter '{name}' came into the model after it was split, and the "
                    "plan has no placement for it: add it (adapters, embeddings) before"
                )

    def _is_in_its_place(self, path: str) -> bool:
        """Whether `path` leads to a replaced module, or to an unsplit one of the same class."""
        module: Any = self.model.root
        for name in path.split("."):
            module = module._modules.get(name)
            if module is None or _is_replacement(module):
                return module is not None
        return boundary_of(module) is None and type(module) is self.classes[path]

    def _compare_ranks(self, replaced: list[tuple[str, nn.Module]]) -> None:
        """Check that what was put into the model is the same on all ranks.

        If modules were replaced, all ranks draw the same random numbers from now on.

        Raises:
            DistributedError: it differs between ranks.
            UsageError: a replaced module has parameters, whose gradients the copies of the model
                would not average.
        """
        model, came = self.model, [*self.arrived]
        if replaced:
            model.draws = "always"
            trains = any(True for _, module in replaced for _ in module.parameters())
            if trains and model.copies is not None:
                raise UsageError(
                    "a module with parameters came into a model after it was split, whose copies "
                    "average the gradients of those that they had: add it before"
                )
            held = [
                (name, x)
                for path, m in replaced
                for name, x in (*m.named_parameters(path), *m.named_buffers(path))
                if not isinstance(x, DTensor)
            ]
            came.append(facts.of_tensors(held))
        if came:
            groups = model.mesh.process_groups(model.mesh.groups)
            what = "what was put into the model after it was split (torch.manual_seed first, alike)"
            agree(
                "comparing what was put into the model",
                facts={what: facts.digest(came)},
                groups=groups,
            )
        self.arrived.clear()
        # Attributes that did not exist when the model was split stay in the list.
        self.settings[:] = [s for s in self.settings if s.before is MISSING]

    def __deepcopy__(self, memo: dict[int, Any]) -> ChangeDetection:
        twin = memo[id(self)] = copy.copy(self)
        for name in ("model", "modules", "settings", "arrived", "kept"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin

    def _is_read(self, name: str) -> bool:
        """Whether code that a forward may run reads an attribute of this name."""
        return name in self.read_names.in_forwards

    def _matters(self, name: str, before: Any, now: Any) -> bool:
        """Whether code may behave differently with the new value. It must read a new attribute."""
        if before is MISSING and (name not in self.read_names.names or now is None):
            return False
        if name.startswith("_attn_implementation") and (before, now) in PAGING:
            proven = self.model.proven
            return proven is None or not proven.pages  # calls without a paged cache raise then
        if "drop" in name and is_plain(now) and now == 0:
            return False  # dropout of 0 does nothing, as in eval mode
        plain = all(one is MISSING or is_plain(one) for one in (before, now))
        return (plain or self._is_read(name)) and _are_different(before, now)


def check_compiled(root: Any) -> None:
    """Check that a model that is being compiled has not changed since its last check.

    Raises:
        UsageError: it may have; dynamo then continues without compiling, if it may.
    """
    if root._shardwright.model.changes.changed or _differs(root):
        raise UsageError(CHANGED)


def _differs(root: Any) -> bool:
    """Whether what a model keeps has changed. Dynamo calls it at each new compilation."""
    return root._shardwright.model.changes.differs()


# What torch.compiler.assume_constant_result does, which imports all of dynamo first.
_differs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_full_sizes(adapter: Any, layer: Any, path: str) -> None:
    """Check that an adapter of peft that replaces `layer` has the full sizes of `layer`.

    Raises:
        UsageError: it has other sizes.
    """
    for name in ("in_features", "out_features"):
        if getattr(adapter, name, None) != getattr(layer, name, None):
            raise UsageError(
                f"peft made an adapter for a shard of '{path}', {name}={getattr(adapter, name)}: "
                "add LoRA adapters inside `with shardwright.adding_adapters():`, and others before "
                "the model is planned and split"
            )


def _is_replacement(module: nn.Module) -> bool:
    """Whether `module` replaces a module of the split model."""
    state = boundary_of(module)
    return state is not None and state.computes_with_full


def _now(module: nn.Module, name: str) -> Any:
    """The value of an attribute of `module` or of its class, or `MISSING`."""
    own = vars(module)
    for store in (own, own["_modules"], own["_parameters"], own["_buffers"]):
        if name in store:
            return store[name]
    return getattr(type(module), name, MISSING)


def _changed_entries(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """The entries that differ between two tables: name, old value, new value."""
    for name in {**before, **now}:
        was, is_now = before.get(name, MISSING), now.get(name, MISSING)
        if was is not is_now:
            yield name, was, is_now


def _are_different(before: Any, now: Any) -> bool:
    """Whether code may behave differently with the two values."""
    if before is now:
        return False
    if type(before) is not type(now):
        return True
    if is_config(now):  # a copy counts as equal
        entries = _changed_entries(vars(before), vars(now))
        return any(_are_different(a, b) for name, a, b in entries if not may_change(name))
    try:
        return bool(before != now)
    except (TypeError, ValueError, RuntimeError):  # arrays, for example
        return True


def _refused(name: str, before: Any, now: Any, left: Iterable[str] = ()) -> UsageError:
    """The error for a change that is not supported. Calls have `left` some attributes changed."""
    was, is_now = (f"{'not there' if x is MISSING else repr(x):.60}" for x in (before, now))
    own = "keep on self what forwards set, and " if "' of the class '" in name else ""
    if others := ", ".join(other for other in left if other != name):
        todo = f"reset all counters or none, also {others}"
        return UsageError(f"'{name}' is {is_now}, and was {was} after the last call: {todo}")
    return UsageError(
        f"'{name}' is {is_now}, and was {was} when the model was split: its code may take "
        f"a path that was not traced: {own}set it before the model is planned and split"
    )
