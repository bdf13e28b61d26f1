"""What a hook is shown in the place of what the model goes on with, and may not do to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.errors import UsageError
from shardwright.runtime.boundary.planned_call import AlwaysPlanned, PlannedCall
from shardwright.runtime.slots import tensors


class HookView(NamedTuple):
    """What a hook on the module `path` was shown, and what the model goes on with in its place."""

    path: str
    shown: StorageWeakRef
    model: Tensor
    stamp: int | Tensor


def note_hook_views(call: PlannedCall | AlwaysPlanned, path: str, shown: Any, model: Any) -> None:
    """Note what a hook was shown in the place of what the model goes on with."""
    if isinstance(call, AlwaysPlanned) or not call.active or torch.compiler.is_compiling():
        return
    views = [view for view in call.hook_views if not view.shown.expired()]
    for (_, full), (_, part) in zip(tensors(shown), tensors(model), strict=True):
        if full is not part:
            storage = StorageWeakRef(full.untyped_storage())
            views.append(HookView(path, storage, part, _stamp(part)))
    call.hook_views = tuple(views)


def check_hook_views(call: PlannedCall) -> None:
    """Check that what hooks keep is as the unsplit model would show it, when a call ends.

    Raises:
        UsageError: it is not.
    """
    views, call.hook_views = call.hook_views, ()
    for view in views:
        if not view.shown.expired() and _changed(view.model, view.stamp):
            raise UsageError(
                f"a hook on '{view.path}' keeps what it was shown, which the model's code then "
                "changes in place (as with inplace=True): let the hook keep a copy (.clone())"
            )


@contextmanager
def unchanged_views(path: str, before: Any, shown: Any) -> Iterator[None]:
    """Check that no tensor that is `shown` in another's place is changed within.

    Nor asked for its gradient, which is that of what this module makes of it, and not of others.

    Raises:
        UsageError: one was: the model would not see that.
    """
    views = [] if torch.compiler.is_compiling() else others(before, shown)
    stamps = [_stamp(x) for x in views]
    yield
    for x, stamp in zip(views, stamps, strict=True):
        if _changed(x, stamp):
            raise UsageError(
                f"a hook on '{path}' changed in place what the module was given, of which each "
                "rank has a part: let it give another tensor instead"
            )
        check_no_gradient_asked(path, x)


def check_no_gradient_asked(path: str, x: Tensor) -> None:
    """Check that nobody asks for the gradient of `x`, which stands for what others have, too.

    Raises:
        UsageError: somebody does.
    """
    if x.retains_grad or x._backward_hooks:
        raise UsageError(
            f"a hook on '{path}' asks for the gradient of what the module was given, of which "
            "each rank has a part: put register_full_backward_hook on the module"
        )


def passed_through(given: Any, output: Any, of: Any = None) -> list[Tensor]:
    """The tensors that a module gives as it was given them; or those in their places in `of`.

    Where the plan changes how one enters, the module has an alias of it.
    """
    known = {_memory(x) for _, x in tensors(given)}
    pairs = zip(tensors(output), tensors(output if of is None else of), strict=True)
    return [new for (_, old), (_, new) in pairs if _memory(old) in known]


def others(before: Any, shown: Any) -> list[Tensor]:
    """The tensors in `shown` that are not those of `before`, which is made alike."""
    pairs = zip(tensors(before), tensors(shown), strict=True)
    return [new for (_, old), (_, new) in pairs if new is not old]


def _memory(x: Tensor) -> tuple[int, torch.Size]:
    """What tensors have in common that are one, made full."""
    base = None if torch.compiler.is_compiling() else x._base
    return id(x if base is None else base), x.shape


def _stamp(x: Tensor) -> int | Tensor:
    """What `_changed` compares a tensor with."""
    return x.clone() if x.is_inference() else x._version


def _changed(x: Tensor, before: int | Tensor) -> bool:
    """Whether somebody wrote into a tensor since its stamp was made."""
    if isinstance(before, Tensor):
        return not torch.equal(_bytes(x), _bytes(before))  # NaN is like itself
    return x._version != before


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
