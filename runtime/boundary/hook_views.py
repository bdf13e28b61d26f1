"""Checks on the full tensors that hooks see while the model continues with local ones.

The model would not see that a hook writes to such a tensor or asks for its gradient, and the hook
would not see that the model then changes its local tensor in place. All three are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.errors import UsageError
from shardwright.runtime.boundary.planned_call import PlannedCall
from shardwright.runtime.slots import tensors


class HookView(NamedTuple):
    """A tensor that a hook on `path` saw, and the local tensor that the model continues with."""

    path: str
    shown: StorageWeakRef
    model: Tensor
    stamp: int | Tensor


def note_hook_views(call: PlannedCall, path: str, shown: Any, model: Any) -> None:
    """Note the tensors that a hook saw in place of those that the model continues with."""
    if call.always or not call.active:
        return
    views = [view for view in call.hook_views if not view.shown.expired()]
    for full, part in _pairs(shown, model):
        if full is not part:
            storage = StorageWeakRef(full.untyped_storage())
            views.append(HookView(path, storage, part, _stamp(part)))
    call.hook_views = tuple(views)


def check_hook_views(call: PlannedCall) -> None:
    """Check, when a call ends, that tensors that hooks keep were not changed by the model.

    Raises:
        UsageError: the model changed its local tensor in place, so the hook's copy is stale.
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
    """Check that the hook that runs inside does not change what it is shown.

    The hook must not ask for the gradient of such a tensor either: it would get only the gradient
    by way of this module, without that of others that use the tensor.

    Args:
        path: The name of the module with the hook.
        before: The local tensors.
        shown: The same values with full tensors.

    Raises:
        UsageError: the hook does either, and the model would not see it.
    """
    views = others(before, shown)
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
    """Check that the gradient of `x`, which a hook saw, is not asked for.

    Raises:
        UsageError: it is (`retain_grad`, or a hook on the tensor).
    """
    if x.retains_grad or x._backward_hooks:
        raise UsageError(
            f"a hook on '{path}' asks for the gradient of what the module was given, of which "
            "each rank has a part: put register_full_backward_hook on the module"
        )


def passed_through(given: Any, output: Any, of: Any = None) -> list[Tensor]:
    """The tensors of `output` that the module was given and returns unchanged.

    If `of` is given, which has the same structure as `output`, its tensors at these places are
    returned instead. An alias of an input counts as the input: redistributions may make one.
    """
    known = {_memory(x) for _, x in tensors(given)}
    pairs = _pairs(output, output if of is None else of)
    return [new for old, new in pairs if _memory(old) in known]


def others(before: Any, shown: Any) -> list[Tensor]:
    """The tensors in `shown` that differ from those of `before`, which has the same structure."""
    return [new for old, new in _pairs(before, shown) if new is not old]


def _pairs(one: Any, other: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors at the same places of two values."""
    return [(x, y) for (_, x), (_, y) in zip(tensors(one), tensors(other), strict=True)]


def _memory(x: Tensor) -> tuple[int, torch.Size]:
    """A key that is equal for a tensor and its views of the same shape."""
    return id(x if x._base is None else x._base), x.shape


def _stamp(x: Tensor) -> int | Tensor:
    """The version of a tensor; a copy if it is an inference tensor, which has none."""
    return x.clone() if x.is_inference() else x._version


def _changed(x: Tensor, before: int | Tensor) -> bool:
    """Whether a tensor was written to since its stamp was made."""
    if isinstance(before, Tensor):
        return not torch.equal(_bytes(x), _bytes(before))  # NaN equals itself by its bytes
    return x._version != before


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
