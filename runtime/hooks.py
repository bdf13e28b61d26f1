"""Forward hooks on modules of a split model: they are given whole tensors, and may give whole ones.

In a forward pass of the model what a module takes and gives lies as the plan has it. A hook that
somebody puts on a module sees it whole, value and gradient, as outside of the model; what it gives
in its place is cut again. What is in a cache is hidden from it. Hooks of torch itself (of FSDP) see
all as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from shardwright.runtime.caches import Caches
    from shardwright.runtime.running import Running

Hook = Callable[..., Any]


class Hooked:
    """Mixin in front of the class of a module."""

    def register_forward_hook(self, hook: Hook, *, with_kwargs: bool = False, **how: Any) -> Any:
        """As in torch; the hook sees whole tensors."""
        seen = _behind(hook, with_kwargs)
        return super().register_forward_hook(seen, with_kwargs=with_kwargs, **how)  # type: ignore[misc]

    def register_forward_pre_hook(
        self, hook: Hook, *, with_kwargs: bool = False, **how: Any
    ) -> Any:
        """As in torch; the hook sees whole tensors."""
        seen = _before(hook, with_kwargs)
        return super().register_forward_pre_hook(seen, with_kwargs=with_kwargs, **how)  # type: ignore[misc]


@dataclass(frozen=True)
class Unchanged:
    """What hooks need on a module that the plan does not change: its tensors are whole."""

    running: Running
    caches: Caches
    alone = None


def watch_unchanged(module: nn.Module, running: Running, caches: Caches) -> None:
    """Let hooks on a module that the plan does not change see no part of a cache."""
    if type(module).forward is nn.Module.forward or isinstance(module, Hooked):
        return
    module._shardwright_unchanged = Unchanged(running, caches)  # type: ignore[assignment]
    module.__class__ = _hooked(type(module))
    see_whole(module)


@functools.cache
def _hooked(original: type) -> type:
    names = ("__doc__", "__module__", "__qualname__")
    members = {name: getattr(original, name) for name in names}
    return type(original.__name__, (Hooked, original), members)


def see_whole(module: Any) -> None:
    """Let the hooks that were on `module` before it was split see whole tensors."""
    for key, hook in module._forward_hooks.items():
        module._forward_hooks[key] = _behind(hook, key in module._forward_hooks_with_kwargs)
    for key, hook in module._forward_pre_hooks.items():
        module._forward_pre_hooks[key] = _before(hook, key in module._forward_pre_hooks_with_kwargs)


def _behind(hook: Hook, with_kwargs: bool) -> Hook:
    trusted = _of("transformers", hook)  # it notes outputs

    @functools.wraps(hook)
    def seen(module: Any, args: Any, *rest: Any) -> Any:
        state = _state(module)
        if not _inside(state):
            return hook(module, args, *rest)
        kwargs, output = rest[0] if with_kwargs else {}, rest[-1]
        if state.alone is not None:
            args, kwargs = state.alone.show(args, kwargs)
            output = state.alone.show_output(output)
        with nullcontext() if trusted else state.caches.closed(args, kwargs, output):
            found = hook(module, args, *([kwargs] if with_kwargs else []), output)
        if found is None or state.alone is None:
            return found
        return state.alone.hide_output(found)

    return hook if _of("torch", hook) else seen


def _before(hook: Hook, with_kwargs: bool) -> Hook:
    trusted = _of("transformers", hook)

    @functools.wraps(hook)
    def seen(module: Any, args: Any, *rest: Any) -> Any:
        state = _state(module)
        if not _inside(state):
            return hook(module, args, *rest)
        kwargs = rest[0] if with_kwargs else {}
        if state.alone is not None:
            args, kwargs = state.alone.show(args, kwargs)
        with nullcontext() if trusted else state.caches.closed(args, kwargs):
            found = hook(module, args, *([kwargs] if with_kwargs else []))
        if found is None or state.alone is None:
            return found
        if with_kwargs:
            return state.alone.hide(*found)
        return state.alone.hide(found if isinstance(found, tuple) else (found,), {})[0]

    return hook if _of("torch", hook) else seen


def _state(module: Any) -> Any:
    return module.__dict__.get("_shardwright") or module._shardwright_unchanged


def _inside(state: Any) -> bool:
    """Whether the module is called by the model, so that tensors lie as the plan has them."""
    return state.running.now or (state.alone is not None and state.alone.again())


def _of(package: str, hook: Hook) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(f"{package}.")
