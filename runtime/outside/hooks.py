"""Hooks on modules of a split model: they are given whole tensors, and may give whole ones.

In a forward pass of the model what a module takes and gives lies as the plan has it. A hook that
somebody puts on a module sees it whole, value and gradient, as outside of the model; what it gives
in its place, or does to it, is cut again. What is in a cache is hidden from it, and parameters that
it reads and modules that it calls are what they are outside of the model. Hooks of torch itself
(of FSDP) and of transformers (which note what the model then gives out, whole) see all as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules

from shardwright.errors import UsageError
from shardwright.runtime.code.copied import Copied
from shardwright.runtime.outside.shown import Given, Shown, changed, stamp
from shardwright.runtime.redistribution.interface import Again
from shardwright.runtime.running import Always, left
from shardwright.runtime.slots import tensors

Hook = Callable[..., Any]

TRUSTED = ("torch.", "transformers.")
"""Packages whose own hooks know what they see."""

BEFORE_ALL, BEHIND_ALL = modules._global_forward_pre_hooks, modules._global_forward_hooks
"""Where torch keeps hooks that are on all modules at once."""


def check_hooks_on_all() -> None:
    """Check that nobody has put forward hooks on all modules at once.

    Raises:
        UsageError: somebody has: they would see parts.
    """
    for hook in (*BEFORE_ALL.values(), *BEHIND_ALL.values()):
        if not _trusted(hook):
            raise UsageError(
                "a hook on all modules (register_module_forward_hook, or the pre hook) would see "
                "parts of tensors in a split model: put hooks on its modules, which see whole ones"
            )


def is_hooked(module: Any) -> bool:
    """Whether somebody has put hooks on `module`: those of torch and transformers do not count."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(not _trusted(hook) for kind in kinds for hook in getattr(module, kind).values())


class Hooked(Copied):
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

    def _get_backward_hooks(self) -> tuple[list[Hook], list[Hook]]:
        """As in torch, for one call; those of a call by the model see whole gradients."""
        full, old = super()._get_backward_hooks()  # type: ignore[misc]
        shown = _shown(self)
        if shown is None:
            return full, old
        if old:
            raise UsageError(
                f"'{shown.path}' has a backward hook of the old kind, which sees gradients of "
                "whatever op came last: use register_full_backward_hook"
            )
        return [_of_gradients(hook, shown, "in") for hook in full], old

    def _get_backward_pre_hooks(self) -> list[Hook]:
        """The same for hooks that run before the module's own backward pass."""
        found = super()._get_backward_pre_hooks()  # type: ignore[misc]
        shown = _shown(self)
        return found if shown is None else [_of_gradients(hook, shown, "out") for hook in found]


def see_whole(module: Any) -> None:
    """Let the hooks that were on `module` before it was split see whole tensors."""
    for key, hook in module._forward_hooks.items():
        module._forward_hooks[key] = _behind(hook, key in module._forward_hooks_with_kwargs)
    for key, hook in module._forward_pre_hooks.items():
        module._forward_pre_hooks[key] = _before(hook, key in module._forward_pre_hooks_with_kwargs)


def _behind(hook: Hook, with_kwargs: bool) -> Hook:
    @functools.wraps(hook)
    def seen(module: Any, args: Any, *rest: Any) -> Any:
        state = _state(module)
        if not is_inside(state):
            return hook(module, args, *rest)
        kwargs, output = rest[0] if with_kwargs else {}, rest[-1]
        shown = state.shown
        if shown is None:
            with state.caches.closed(args, kwargs, output), left(state.running):
                return hook(module, args, *rest)
        shown = shown.call_of(args, kwargs, output)
        given, whole = shown.whole(args, kwargs), shown.whole_output(output)
        around, more = (args, kwargs), [given[1]] if with_kwargs else []
        same = _through(around, output), _through(around, output, whole)
        alone = _untouched(shown.path, (around, same[0]), (given, same[1]))
        with state.caches.closed(*around, output), alone, left(state.running):
            found = hook(module, given[0], *more, whole)
        for x in same[0]:
            if not any(x is one for one in _tensors(around)):
                _check_unasked(shown.path, x)
        _note(state, shown.path, given, around)
        if found is None and not _others(output, whole):
            return None
        found = whole if found is None else found
        cut = shown.cut_output(found)
        _note(state, shown.path, found, cut)
        return cut

    return hook if _trusted(hook) else seen


def _before(hook: Hook, with_kwargs: bool) -> Hook:
    @functools.wraps(hook)
    def seen(module: Any, args: Any, *rest: Any) -> Any:
        state = _state(module)
        if not is_inside(state):
            return hook(module, args, *rest)
        kwargs = rest[0] if with_kwargs else {}
        shown = state.shown
        if shown is None:
            with state.caches.closed(args, kwargs), left(state.running):
                return hook(module, args, *rest)
        shown = shown.call_of(args, kwargs)
        given = shown.whole(args, kwargs)
        around, more = (args, kwargs), [given[1]] if with_kwargs else []
        alone = _untouched(shown.path, around, given)
        with state.caches.closed(*around), alone, left(state.running):
            found = hook(module, given[0], *more)
        if found is None:
            found = given if with_kwargs else given[0]
        if not with_kwargs:
            found = found if isinstance(found, tuple) else (found,), {}
        cut = shown.cut(*found)
        _note(state, shown.path, found, cut)
        return cut if with_kwargs else cut[0]

    return hook if _trusted(hook) else seen


def _of_gradients(hook: Hook, shown: Shown, side: str) -> Hook:
    """A hook on gradients that is given whole ones, and whose result is cut again."""
    if _trusted(hook):
        return hook
    place = shown.place()

    @functools.wraps(hook)
    def seen(module: Any, *grads: Any) -> Any:
        sides = ("in", "out")[-len(grads) :]  # one before its backward pass has no gradients in
        call = shown.call_of_gradients(grads, sides, place)
        given = [call.whole_gradients(g, s) for g, s in zip(grads, sides, strict=True)]
        with left(_state(module).running):
            found = hook(module, *given)
        if found is None:
            return None
        return call.cut_gradients(found if isinstance(found, tuple) else (found,), side)

    return seen


def _note(state: Any, path: str, shown: Any, model: Any) -> None:
    """Note what was shown in the place of what the model goes on with, until its forward ends."""
    running = state.running
    if isinstance(running, Always) or not running.now or torch.compiler.is_compiling():
        return
    still = (given for given in running.shown if not given.shown.expired())
    running.shown = (*still, *Given.pairs(path, shown, model))


def check_kept(running: Any) -> None:
    """Check that what hooks keep is as the unsplit model would show it, when a forward ends.

    Raises:
        UsageError: it is not.
    """
    found, running.shown = running.shown, ()
    for given in found:
        given.check()


@contextmanager
def _untouched(path: str, before: Any, given: Any) -> Iterator[None]:
    """Check that no tensor that is `given` in another's place is changed within.

    Nor asked for its gradient, which is that of what this module makes of it, and not of others.

    Raises:
        UsageError: one was: the model would not see that.
    """
    copies = [] if torch.compiler.is_compiling() else _others(before, given)
    stamps = [stamp(x) for x in copies]
    yield
    for x, before_it in zip(copies, stamps, strict=True):
        if changed(x, before_it):
            raise UsageError(
                f"a hook on '{path}' changed in place what the module was given, of which each "
                "rank has a part: let it give another tensor instead"
            )
        _check_unasked(path, x)


def _check_unasked(path: str, x: Tensor) -> None:
    """Check that nobody asks for the gradient of `x`, which stands for what others have, too.

    Raises:
        UsageError: somebody does.
    """
    if x.retains_grad or x._backward_hooks:
        raise UsageError(
            f"a hook on '{path}' asks for the gradient of what the module was given, of which "
            "each rank has a part: put register_full_backward_hook on the module"
        )


def _through(given: Any, output: Any, of: Any = None) -> list[Tensor]:
    """The tensors that a module gives as it was given them; or those in their places in `of`.

    Where the plan changes how one enters, the module has an alias of it.
    """
    known = {_memory(x) for x in _tensors(given)}
    pairs = zip(_tensors(output), _tensors(output if of is None else of), strict=True)
    return [new for old, new in pairs if _memory(old) in known]


def _memory(x: Tensor) -> tuple[int, torch.Size]:
    """What tensors have in common that are one, seen whole."""
    base = None if torch.compiler.is_compiling() else x._base
    return id(x if base is None else base), x.shape


def _others(before: Any, given: Any) -> list[Tensor]:
    """The tensors in `given` that are not those of `before`, which is made alike."""
    pairs = zip(_tensors(before), _tensors(given), strict=True)
    return [new for old, new in pairs if new is not old]


def _tensors(value: Any) -> list[Tensor]:
    return [x for _, x in tensors(value)]


def _state(module: Any) -> Any:
    return module.__dict__.get("_shardwright") or module._shardwright_unchanged


def _shown(module: Any) -> Shown | None:
    """What hooks see in this call of a module; None where all is whole as it is."""
    state = _state(module)
    return state.shown if is_inside(state) else None


def is_inside(state: Any) -> bool:
    """Whether the module is called by the model, so that tensors lie as the plan has them."""
    running, unchanged = state.running, isinstance(state, Again)
    alone: Again | None = state if unchanged else state.alone
    if running.now:
        if alone is not None:
            alone.inside = True
        return True
    if alone is None or (not running.left and alone.again()):
        return alone is not None
    if unchanged and torch._C._current_graph_task_id() == -1:
        alone.called = True
    return False


def _trusted(hook: Hook) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(TRUSTED)
