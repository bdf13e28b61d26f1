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
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from shardwright.runtime.failure import failed
from shardwright.runtime.mesh import Group
from shardwright.runtime.shared_memory.channel import DTYPES, Channel
from shardwright.runtime.shared_memory.connect import channel_of

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
    if torch.compiler.is_compiling():
        return _ops.wait_tensor(op(x, *rest, group.name))
    kind, run = EAGER[op.__name__]
    _tell(kind, x)
    assert group.pg is not None
    try:
        return run(group.pg, x, *rest)
    except RuntimeError as error:
        raise failed(op.__name__, error, group.pg) from error


def _reduced(pg: dist.ProcessGroup, x: Tensor, op: str) -> Tensor:
    if channel := _channel(pg, x, reduces=True):
        return channel.all_reduce(x, op)
    out = x.clone()
    dist.all_reduce(out, REDUCTIONS[op], pg)
    return out


def _gathered(pg: dist.ProcessGroup, x: Tensor, ranks: int) -> Tensor:
    if channel := _channel(pg, x, reduces=False):
        return channel.all_gather(x)
    out = x.new_empty(ranks * x.numel())
    dist.all_gather_into_tensor(out, x, pg)
    return out


def _scattered(pg: dist.ProcessGroup, x: Tensor, op: str, ranks: int) -> Tensor:
    if channel := _channel(pg, x, reduces=True):
        return channel.reduce_scatter(x)
    out = x.new_empty(x.numel() // ranks)
    dist.reduce_scatter_tensor(out, x, REDUCTIONS[op], pg)
    return out


REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
EAGER: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "all_reduce": ("all_reduce", _reduced),
    "all_gather_into_tensor": ("all_gather", _gathered),
    "reduce_scatter_tensor": ("reduce_scatter", _scattered),
}
"""Functional op -> kind, and what is done in its place outside of compiled graphs."""


def _channel(pg: dist.ProcessGroup, x: Tensor, reduces: bool) -> Channel | None:
    """What `x` can go through instead of the backend; the same on all ranks."""
    if x.device.type != "cpu" or (reduces and x.dtype not in DTYPES):
        return None
    return channel_of(pg)


def _pretend(kind: str, x: Tensor) -> Tensor:
    _tell(kind, x)
    return x.clone()


def _tell(kind: str, x: Tensor) -> None:
    for mode in _get_current_dispatch_mode_stack():  # of this thread, as ranks may be threads
        if isinstance(mode, Listener):
            mode.note(kind, x)
