"""Three collectives as plain functions of a tensor.

They change nothing in place, are not differentiable, and torch.compile can trace them. A group of
one rank communicates nothing. A shape-only group neither; its calls are shown to `observers`, so
that a plan tried out on meta can be audited like a real run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright.runtime.failure import failed
from shardwright.runtime.mesh import Group

_ops = torch.ops._c10d_functional

observers: list[Callable[[str, Tensor], None]] = []
"""Called with (kind, input) for each collective of a shape-only group."""


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """`x`, summed (or "max", "min") over the ranks; the same shape."""
    if group.size == 1:
        return x
    if group.pg is None:
        return _pretend("all_reduce", x)
    return _run(group, _ops.all_reduce, x.contiguous(), op, group.name)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """The `x` of all ranks, equal in shape, stacked: [*shape] -> [ranks, *shape]."""
    if group.size == 1:
        return x.unsqueeze(0)
    if group.pg is None:
        return torch.stack([_pretend("all_gather", x)] * group.size)
    # Flat, since some backends gather only along dim 0 and a 0-dim tensor has none.
    flat = _run(group, _ops.all_gather_into_tensor, x.reshape(-1), group.size, group.name)
    return flat.view(group.size, *x.shape)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Row `rank` of the sum of all `x`: [ranks, *shape] -> [*shape]."""
    if group.size == 1:
        return x.squeeze(0)
    if group.pg is None:
        return _pretend("reduce_scatter", x)[group.rank].clone()
    flat = _run(group, _ops.reduce_scatter_tensor, x.reshape(-1), "sum", group.size, group.name)
    return flat.view(x.shape[1:])


def _run(group: Group, op: Callable[..., Tensor], *args: object) -> Tensor:
    """The result of a collective; one that fails because a rank died says which.

    A compiled graph does not come back here when it runs: there, the backend's own error is raised.
    """
    if torch.compiler.is_compiling():
        return _ops.wait_tensor(op(*args))
    try:
        return _ops.wait_tensor(op(*args))
    except RuntimeError as error:
        raise failed(op.__name__, error, group.pg) from error


def _pretend(kind: str, x: Tensor) -> Tensor:
    for observer in observers:
        observer(kind, x)
    return x.clone()
