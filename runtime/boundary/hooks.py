"""Hooks on modules of a split model: they see full tensors, and may return full tensors.

In a planned call, the inputs and outputs of a module have the planned placements. A user's hook
sees them gathered, values and gradients. If it returns other tensors, these are sharded again.
Caches are sealed while it runs. Hooks of torch itself (of FSDP) and of transformers (which collect
outputs of the model) see local tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as modules

from shardwright.errors import UsageError
from shardwright.runtime.boundary import hook_views
from shardwright.runtime.boundary.interface import AROUND, ModuleInterface
from shardwright.runtime.boundary.planned_call import in_hook
from shardwright.runtime.calls.caches import Caches
from shardwright.runtime.slots import tensors

Hook = Callable[..., Any]

TRUSTED = ("torch.", "transformers.")
"""Packages whose hooks may see local tensors."""

EAGER = (
    "hooks on a split model are checked while they run, outside of graphs: compile without "
    "fullgraph=True, or take the hook off"
)
"""Why torch.compile does not trace hooks, in the error of `fullgraph=True`."""

BEFORE_ALL, BEHIND_ALL = modules._global_forward_pre_hooks, modules._global_forward_hooks
"""Torch's tables of hooks on all modules: forward pre hooks, and forward hooks."""


def check_hooks_on_all() -> None:
    """Check that there are no forward hooks on all modules at once, except trusted ones.

    Raises:
        UsageError: there is one: it would see local tensors.
    """
    for hook in (*BEFORE_ALL.values(), *BEHIND_ALL.values()):
        if not is_trusted(hook):
            raise UsageError(
                "a hook on all modules (register_module_forward_hook, or the pre hook) would see "
                "parts of tensors in a split model: put hooks on its modules, which see full ones"
            )


class HookedModule:
    """Mixin in front of the class of a module: its hooks see full tensors."""

    def register_forward_hook(self, hook: Hook, *, with_kwargs: bool = False, **how: Any) -> Any:
        """As in torch; the hook sees full tensors."""
        hook = _seeing_full(hook, with_kwargs)
        return super().register_forward_hook(hook, with_kwargs=with_kwargs, **how)  # type: ignore[misc]

    def register_forward_pre_hook(
        self, hook: Hook, *, with_kwargs: bool = False, **how: Any
    ) -> Any:
        """As in torch; the hook sees full tensors."""
        hook = _seeing_full(hook, with_kwargs)
        return super().register_forward_pre_hook(hook, with_kwargs=with_kwargs, **how)  # type: ignore[misc]

    @torch.compiler.disable(reason=EAGER)
    def _get_backward_hooks(self) -> tuple[list[Hook], list[Hook]]:
        """As in torch, for one call. In a planned call, the hooks see full gradients."""
        full, old = super()._get_backward_hooks()  # type: ignore[misc]
        interface = _interface(self)
        if interface is None:
            return full, old
        if old:
            raise UsageError(
                f"'{interface.path}' has a backward hook of the old kind, which sees gradients of "
                "whatever op came last: use register_full_backward_hook"
            )
        return [_gradient_hook(hook, interface, "in") for hook in full], old

    @torch.compiler.disable(reason=EAGER)
    def _get_backward_pre_hooks(self) -> list[Hook]:
        """As `_get_backward_hooks`, for hooks that run before the module's backward pass."""
        found = super()._get_backward_pre_hooks()  # type: ignore[misc]
        interface = _interface(self)
        if interface is None:
            return found
        return [_gradient_hook(hook, interface, "out") for hook in found]


def wrap_hooks(module: Any) -> None:
    """Let forward hooks that `module` had before it was split see full tensors."""
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        hooks, with_kwargs = getattr(module, kind), getattr(module, f"{kind}_with_kwargs")
        hooks.update({key: _seeing_full(hook, key in with_kwargs) for key, hook in hooks.items()})


def _interface(module: Any) -> ModuleInterface | None:
    """The interface of a module in a planned call; None if the plan has no entry or none runs."""
    boundary = module._shardwright
    return boundary.interface if boundary.note_call() else None


def _seeing_full(hook: Hook, with_kwargs: bool) -> Hook:
    """Wrap a forward hook, or a forward pre hook, which is given no output."""
    if is_trusted(hook):
        return hook

    @functools.wraps(hook)
    def with_full_tensors(module: Any, args: Any, *rest: Any) -> Any:
        boundary = module._shardwright
        if not boundary.note_call():
            return hook(module, args, *rest)
        kwargs, output = (rest[0], rest[1:]) if with_kwargs else ({}, rest)
        around, interface = (args, kwargs), boundary.interface
        sealed = _caches(boundary).sealed(around, output)
        if interface is None:
            with sealed, in_hook(boundary.call):
                return hook(module, args, *rest)
        interface.check_alike()
        given = interface.arguments_as(args, kwargs, AROUND, full=True)
        full = [interface.output_as(x, AROUND, full=True) for x in output]
        passed = (
            hook_views.passed_through(around, output),
            hook_views.passed_through(around, output, full),
        )
        unchanged = hook_views.unchanged_views(
            interface.path, (around, passed[0]), (given, passed[1])
        )
        with sealed, unchanged, in_hook(boundary.call):
            found = hook(module, *(given if with_kwargs else given[:1]), *full)
        for x in passed[0]:
            if not any(x is one for _, one in tensors(around)):
                hook_views.check_no_gradient_asked(interface.path, x)
        if output:
            hook_views.note_hook_views(boundary.call, interface.path, given, around)
            if found is None and not hook_views.others(output, full):
                return None
            found = full[0] if found is None else found
            part = interface.output_as(found, AROUND, full=False)
        else:
            if found is None:
                found = given
            elif not with_kwargs:
                found = found if isinstance(found, tuple) else (found,), {}
            part = interface.arguments_as(*found, AROUND, full=False)
        hook_views.note_hook_views(boundary.call, interface.path, found, part)
        return part if output or with_kwargs else part[0]

    return torch.compiler.disable(with_full_tensors, reason=EAGER)


def _gradient_hook(hook: Hook, interface: ModuleInterface, side: str) -> Hook:
    """Wrap a hook on gradients: it is given full ones, and its result is sharded again."""
    if is_trusted(hook):
        return hook
    interface.check_alike()

    @functools.wraps(hook)
    def with_full_gradients(module: Any, *grads: Any) -> Any:
        sides = ("in", "out")[-len(grads) :]  # a pre hook is given only the last
        given = [interface.gradients_as(g, s, full=True) for g, s in zip(grads, sides, strict=True)]
        with in_hook(module._shardwright.call):
            found = hook(module, *given)
        if found is None:
            return None
        found = found if isinstance(found, tuple) else (found,)
        return interface.gradients_as(found, side, full=False)

    return with_full_gradients


def _caches(boundary: Any) -> Caches:
    return Caches() if boundary.model is None else boundary.model.caches


def is_trusted(hook: Hook) -> bool:
    """Whether a hook may see local tensors."""
    return str(getattr(hook, "__module__", "")).startswith(TRUSTED)
