"""Collectives as plain functions of a tensor.

They are not differentiable, change no input unless told that it is spent, and can be traced by
torch.compile. Groups of one rank and shape-only groups do not communicate. Every collective outside
compiled graphs is reported to the `Listener` modes around it, so that a plan that is tried out on
meta can be audited like a real run.

Eager collectives of CPU ranks on one host go through shared memory where possible, and sums of GPU
ranks do if the user asks for it. Compiled ones are functional collectives, which Inductor supports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.ranks.failure import failed
from shardwright.runtime.shared_memory.channel import DTYPES

_ops = torch.ops._c10d_functional


class Listener(TorchDispatchMode):
    """A mode that is told of each collective inside, including those of backward passes."""

    def note(self, kind: str, x: Tensor) -> None:
        """Receive the input of an all_reduce, all_gather, reduce_scatter or all_to_all."""
        raise NotImplementedError


def all_reduce(x: Tensor, group: Group, op: str = "sum", spent: bool = False) -> Tensor:
    """Return the sum (or "max", "min") of `x` over the ranks, in the same shape.

    The result may overwrite `x` if it is `spent`, which means that nobody reads it any more.
    """
    if group.size == 1:
        return x
    if group.pg is None:
        return _pretend("all_reduce", x)
    return _run(group, "all_reduce", x.contiguous(), op, spent)


def all_gather(x: Tensor, group: Group, dim: int | None = None) -> Tensor:
    """Stack the `x` of all ranks, which have equal shapes: [*shape] -> [ranks, *shape].

    With `dim`, concatenate them along it: [..., n, ...] -> [..., ranks * n, ...].
    """
    if group.size == 1:
        return x.unsqueeze(0) if dim is None else x
    before, behind = x.shape[: dim or 0], x.shape[dim or 0 :]
    if group.pg is None:
        parts = [_pretend("all_gather", x)] * group.size
        return torch.stack(parts) if dim is None else torch.cat(parts, dim)
    # Flat, since some backends gather only along dim 0, which a 0-dim tensor does not have.
    flat = _run(group, "all_gather", x.reshape(-1), rows=before.numel() or 1)
    if dim is None:
        return flat.view(group.size, *behind)
    return flat.view(*before, group.size * behind[0], *behind[1:])


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Return row `rank` of the sum of all `x`: [ranks, *shape] -> [*shape]."""
    if group.size == 1:
        return x.squeeze(0)
    if group.pg is None:
        return _pretend("reduce_scatter", x)[group.rank].clone()
    flat = _run(group, "reduce_scatter", x.reshape(-1))
    return flat.view(x.shape[1:])


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Send rows of `x` to each rank, in the order of ranks: [sum(send), n] -> [sum(receive), n].

    Not in compiled graphs, and not for shape-only groups.

    Args:
        x: The rows.
        send: How many of them each rank gets.
        receive: How many rows come from each rank.
        group: The ranks.
    """
    assert group.pg is not None, "how many rows come is known on ranks only"
    if _len_torch_dispatch_stack():
        _tell("all_to_all", x)
    x, width = x.contiguous(), x.shape[1:].numel()
    try:
        if x.is_cpu and (channel := group.channel) is not None:
            sizes = [n * width for n in send], [n * width for n in receive]
            return channel.run("all_to_all", x, sizes=sizes).view(sum(receive), *x.shape[1:])
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x, [*receive], [*send], group=group.pg)
    except RuntimeError as error:
        raise failed("all_to_all", error, group.pg) from error
    return out


def begin_all_reduce(x: Tensor, group: Group) -> tuple[Tensor, Callable[[], None]]:
    """Start summing `x` over the ranks; return the new tensor and a function that waits for it.

    Only for groups with a backend, and not in compiled graphs.
    """
    if _len_torch_dispatch_stack():
        _tell("all_reduce", x)
    assert group.pg is not None
    out = x.clone(memory_format=torch.contiguous_format)
    try:
        plain = torch.view_as_real(out) if out.is_complex() else out
        work = group.pg.allreduce([plain], _options("sum", later=True))
    except RuntimeError as error:
        raise failed("all_reduce", error, group.pg) from error

    def wait() -> None:
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise failed("all_reduce", error, group.pg) from error

    return out, wait


def _run(
    group: Group, kind: str, x: Tensor, op: str = "sum", spent: bool = False, rows: int = 1
) -> Tensor:
    """Run a collective (see `Channel.run`); if a rank died, the error names it."""
    watched = _len_torch_dispatch_stack()
    if isinstance(x, FakeTensor) or (watched and torch.compiler.is_compiling()):
        return _traced(group, kind, x, op, rows=rows)
    if watched:
        _tell(kind, x)
    try:
        if (
            x.is_cpu
            and (channel := group.channel) is not None
            and (kind == "all_gather" or x.dtype in DTYPES)
        ):
            return channel.run(kind, x, op, spent, rows)
        if kind == "all_reduce":
            return _all_reduced(group, x, op, spent)
        return _gathered(group, x, rows) if kind == "all_gather" else _scattered(group, x)
    except RuntimeError as error:
        raise failed(kind, error, group.pg) from error


def _traced(
    group: Group, kind: str, x: Tensor, op: str = "sum", _: bool = False, rows: int = 1
) -> Tensor:
    """The collective in a compiled graph, whose run does not come back to this module.

    A failing graph raises the backend's own error.
    """
    if kind == "all_reduce":
        return _ops.wait_tensor(_ops.all_reduce(x, op, group.name))
    if kind == "all_gather":
        out = _ops.wait_tensor(_ops.all_gather_into_tensor(x, group.size, group.name))
        return in_rows(out, group.size, rows)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, op, group.size, group.name))


# Dynamo traces this instead. Testing for Dynamo inside `_run` would cost two calls per token.
_run._torchdynamo_inline = _traced  # type: ignore[attr-defined]


# These call the backend directly: most of what `torch.distributed` checks first is known here.


def _all_reduced(group: Group, x: Tensor, op: str, spent: bool) -> Tensor:
    assert group.pg is not None
    if x.is_cuda and (shared := group.symmetric) is not None:
        found = shared.all_reduce(x, op, spent)
        if found is not None:
            return found
    out = x if spent else x.clone()
    plain = torch.view_as_real(out) if out.is_complex() else out
    work = group.pg.allreduce([plain], _options(op))
    if work is not None:
        work.wait()
    return out


@cache
def _options(op: str, later: bool = False) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = REDUCTIONS[op], later
    return options


def _gathered(group: Group, x: Tensor, rows: int) -> Tensor:
    out = x.new_empty(group.size * x.numel())
    dist.all_gather_single(out, x, group.pg)
    return in_rows(out, group.size, rows)


def in_rows(x: Tensor, ranks: int, rows: int) -> Tensor:
    """Reorder flat [ranks, rows, n], as a backend gathers it, to flat [rows, ranks, n]."""
    return x if rows == 1 else x.view(ranks, rows, -1).transpose(0, 1).reshape(-1)


def _scattered(group: Group, x: Tensor) -> Tensor:
    out = x.new_empty(x.numel() // group.size)
    dist.reduce_scatter_single(out, x, dist.ReduceOp.SUM, group.pg)
    return out


REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _pretend(kind: str, x: Tensor) -> Tensor:
    _tell(kind, x)
    return x.clone()


def _tell(kind: str, x: Tensor) -> None:
    for mode in _get_current_dispatch_mode_stack():  # of this thread only: ranks may be threads
        if isinstance(mode, Listener):
            mode.note(kind, x)
