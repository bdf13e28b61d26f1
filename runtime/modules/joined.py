"""Plain numbers joined with DTensors, as a loss with a penalty on parameters: their gradients.

torch takes a plain number for one that all ranks have alike, so `loss + penalty` is a DTensor, and
right. Backward, what comes to the loss is a DTensor too, which plain ops further on do not take.
So where a backward pass begins at a DTensor, each gradient that goes from DTensors on to plain
tensors is made a plain one, whole on every rank, as gradients of what a split model gives are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._api import _ToTorchTensor

from shardwright.runtime.tensors.to_local import ToLocal


@cache
def watch_joins() -> None:
    """From now on see to these gradients in `backward()` of a DTensor."""
    DTensor.backward = _backward  # type: ignore[method-assign]


def _backward(self: Any, *args: Any, **kwargs: Any) -> None:
    hooks = [node.register_prehook(_plain) for node in _joined(self.grad_fn)]
    try:
        Tensor.backward(self, *args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()


def _plain(grads: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)


def _joined(root: Any) -> list[Any]:
    """The nodes behind `root` that want plain gradients and get them of one for DTensors."""
    distributed: dict[Any, bool] = {}
    todo = [root]
    while todo:
        node = todo[-1]
        behind = [n for n, _ in node.next_functions if n is not None]
        left = [n for n in behind if n not in distributed]
        todo += left
        if not left:
            todo.pop()
            distributed[node] = _of_dtensor(node, any(distributed[n] for n in behind))
    distributed[root] = True
    of_dtensors = [node for node, is_so in distributed.items() if is_so]
    behind = {n for node in of_dtensors for n, _ in node.next_functions if n is not None}
    return [node for node in behind if not distributed[node]]


_TO_PLAIN: tuple[Any, ...] = (ToLocal._backward_cls, _ToTorchTensor._backward_cls)
"""Of the functions that take DTensors and give plain tensors."""


def _of_dtensor(node: Any, behind: bool) -> bool:
    """Whether the gradient that comes to `node` is one of a DTensor; not sure for code of others.

    Where it is taken for one and is not, torch raises that the two are mixed.
    """
    if isinstance(node, _TO_PLAIN):
        return False
    return behind or isinstance(getattr(node, "variable", None), DTensor)
