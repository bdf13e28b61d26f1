"""Three collectives as plain functions of a tensor.

They change nothing in place, are not differentiable, and torch.compile can trace them. A group of
one rank communicates nothing. A shape-only group neither. All but those of compiled graphs tell a
`Listener` around them, so that a plan tried out on meta can be audited like a real run.

Eager ones of CPU ranks on one host go through memory that these share, if they can. Compiled ones
are functional collectives, which Inductor knows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from shardwright.runtime.failure import failed
from shardwright.runtime.mesh import Group
from shardwright.runtime.shared_memory.channel import DTYPES

_ops = torch.ops._c10d_functional


class Listener(TorchDispatchMode):
    """A mode that is told of each collective inside, backward passes and all."""

    def note(self, kind: str, x: Tensor) -> None:
        """Called with the input of a collective: an all_reduce, all_gather or reduce_scatter."""
        raise NotImplementedError


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """`x`, summed (or "max", "min") over the ranks; the same shape."""
    if group.size == 1:
        return x
    if group.pg is None:
        return _pretend("all_reduce", x)
    return _run(group, _ops.all_reduce, x.contiguous(), op)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """The `x` of all ranks, equal in shape, stacked: [*shape] -> [ranks, *shape]."""
    if group.size == 1:
        return x.unsqueeze(0)
    if group.pg is None:
        return torch.stack([_pretend("all_gather", x)] * group.size)
    # Flat, since some backends gather only along dim 0 and a 0-dim tensor has none.
    flat = _run(group, _ops.all_gather_into_tensor, x.reshape(-1), group.size)
    return flat.view(group.size, *x.shape)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Row `rank` of the sum of all `x`: [ranks, *shape] -> [*shape]."""
    if group.size == 1:
        return x.squeeze(0)
    if group.pg is None:
        return _pretend("reduce_scatter", x)[group.rank].clone()
    flat = _run(group, _ops.reduce_scatter_tensor, x.reshape(-1), "sum", group.size)
    return flat.view(x.shape[1:])


def _run(group: Group, op: Callable[..., Tensor], x: Tensor, *rest: object) -> Tensor:
    """The result of a collective; one that fails because a rank died says which.

    A compiled graph does not come back here when it runs: there, the backend's own error is raised.
    """
    if torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return _ops.wait_tensor(op(x, *rest, group.name))
    if _len_torch_dispatch_stack():
        _tell(KINDS[op.__name__], x)
    try:
        return RUN[op.__name__](group, x, *rest)
    except RuntimeError as error:
        raise failed(op.__name__, error, group.pg) from error


# Through memory if `x` can, which is the same on all ranks; else by the backend, in place.


def _reduced(group: Group, x: Tensor, op: str) -> Tensor:
    if x.is_cpu and x.dtype in DTYPES and (channel := group.channel) is not None:
        return channel.all_reduce(x, op)
    out = x.clone()
    dist.all_reduce(out, REDUCTIONS[op], group.pg)
    return out


def _gathered(group: Group, x: Tensor, ranks: int) -> Tensor:
    if x.is_cpu and (channel := group.channel) is not None:
        return channel.all_gather(x)
    out = x.new_empty(ranks * x.numel())
    dist.all_gather_into_tensor(out, x, group.pg)
    return out


def _scattered(group: Group, x: Tensor, op: str, ranks: int) -> Tensor:
    if x.is_cpu and x.dtype in DTYPES and (channel := group.channel) is not None:
        return channel.reduce_scatter(x)
    out = x.new_empty(x.numel() // ranks)
    dist.reduce_scatter_tensor(out, x, REDUCTIONS[op], group.pg)
    return out


REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""Functional op -> what it is in plans."""
RUN: dict[str, Callable[..., Tensor]] = dict(
    zip(KINDS, (_reduced, _gathered, _scattered), strict=True)
)
"""Functional op -> what is done in its place outside of compiled graphs."""


def _pretend(kind: str, x: Tensor) -> Tensor:
    _tell(kind, x)
    return x.clone()


def _tell(kind: str, x: Tensor) -> None:
    for mode in _get_current_dispatch_mode_stack():  # of this thread, as ranks may be threads
        if isinstance(mode, Listener):
            mode.note(kind, x)
