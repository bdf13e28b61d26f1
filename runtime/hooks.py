"""Forward hooks on modules that are split: they are given whole tensors, and may give whole ones.

In a forward pass of the model what a module takes and gives lies as the plan has it. A hook that
somebody puts on a module sees it whole, value and gradient, as outside of the model; what it gives
in its place is cut again. Hooks of torch itself (of FSDP) see it as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Hook = Callable[..., Any]


class Hooked:
    """Mixin in front of the class of a module that is split."""

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


def see_whole(module: Any) -> None:
    """Let the hooks that were on `module` before it was split see whole tensors."""
    for key, hook in module._forward_hooks.items():
        module._forward_hooks[key] = _behind(hook, key in module._forward_hooks_with_kwargs)
    for key, hook in module._forward_pre_hooks.items():
        module._forward_pre_hooks[key] = _before(hook, key in module._forward_pre_hooks_with_kwargs)


def _behind(hook: Hook, with_kwargs: bool) -> Hook:
    @functools.wraps(hook)
    def seen(module: Any, args: Any, *rest: Any) -> Any:
        if not _inside(module):
            return hook(module, args, *rest)
        alone = module._shardwright.alone
        args, kwargs = alone.show(args, rest[0] if with_kwargs else {})
        output = alone.show_output(rest[-1])
        found = hook(module, args, *([kwargs] if with_kwargs else []), output)
        return None if found is None else alone.hide_output(found)

    return hook if _of_torch(hook) else seen


def _before(hook: Hook, with_kwargs: bool) -> Hook:
    @functools.wraps(hook)
    def seen(module: Any, args: Any, *rest: Any) -> Any:
        if not _inside(module):
            return hook(module, args, *rest)
        alone = module._shardwright.alone
        args, kwargs = alone.show(args, rest[0] if with_kwargs else {})
        found = hook(module, args, *([kwargs] if with_kwargs else []))
        if found is None:
            return None
        if with_kwargs:
            return alone.hide(*found)
        return alone.hide(found if isinstance(found, tuple) else (found,), {})[0]

    return hook if _of_torch(hook) else seen


def _inside(module: Any) -> bool:
    """Whether the module is called by the model, so that tensors lie as the plan has them."""
    state = module._shardwright
    if state.alone is None:
        return False
    return state.running.now or state.alone.again()


def _of_torch(hook: Hook) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.")
