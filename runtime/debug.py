"""Debug mode (SHARDWRIGHT_DEBUG=1): ranks compare their inputs and their progress at each forward.

Ranks with different batches, lengths or dtypes, or whose code took different paths, call different
collectives. They wait for each other, abort, or compute wrong results. In debug mode they stop with
an error that names the first difference. This takes a small collective for each redistribution.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwright.errors import DistributedError
from shardwright.planner.contract.dims import unsplit
from shardwright.planner.contract.names import dtype_name
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.boundary.module_boundary import boundaries
from shardwright.runtime.communication import facts
from shardwright.runtime.ranks.agreement import gather
from shardwright.runtime.redistribution.reshard import ByDims


def wanted() -> bool:
    """Whether SHARDWRIGHT_DEBUG is set."""
    return os.environ.get("SHARDWRIGHT_DEBUG", "0") not in ("", "0")


def watch(model: nn.Module, groups: Sequence[ProcessGroup]) -> None:
    """From now on, compare each forward of a split `model` over the ranks of `groups`.

    Args:
        model: A model to which a plan was applied.
        groups: The groups of the mesh dims whose ranks take the same batch.
    """
    if not groups:
        return
    for path, boundary in boundaries(model):
        sides = {"input": boundary.inputs, "output": boundary.outputs}
        for word, changes in {**sides, "attribute": boundary.attributes}.items():
            for change in changes:
                slot = f" '{change.slot}'" if change.slot else ""
                change.reshard = _Compared(change.reshard, f"{word}{slot} of '{path}'", groups)
        boundary.idle_in = boundary.idle_out = False  # no redistribution may be skipped
        boundary.sole_output = None

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        for name, value in given.items():
            _compare(f"argument '{name}' of the model", _words(value), groups)

    def leave(*_: Any) -> None:
        _compare("end of the forward", "", groups)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave)


class _Compared:
    """A redistribution that first compares the tensor between ranks."""

    def __init__(
        self, reshard: Callable[[Tensor], Tensor], where: str, groups: Sequence[ProcessGroup]
    ) -> None:
        self.reshard, self.where, self.groups = reshard, where, groups

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            _compare(self.where, _local(x, self._placement(x)), self.groups)
        return self.reshard(x)

    def _placement(self, x: Tensor) -> Placement | None:
        reshard: Any = self.reshard
        if isinstance(reshard, ByDims):
            reshard = reshard.reshards.get(x.dim())
        return getattr(reshard, "source", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Compared:
        return self


def _compare(where: str, what: str, groups: Sequence[ProcessGroup]) -> None:
    mine = (torch.distributed.get_rank(), where, what)
    for group in groups:
        first, *others = gather("comparing the calls", mine, group, tuple[int, str, str])
        for other in others:
            if other[1:] != first[1:]:
                a, b = (f"rank {r} is at the {place} {text}" for r, place, text in (first, other))
                raise DistributedError(
                    f"{a.rstrip()}, {b.rstrip()}: give the ranks the same inputs, and code that "
                    "does the same on each"
                )


def _local(x: Tensor, placement: Placement | None) -> str:
    sizes = [str(size) for size in x.shape]
    if placement is not None and len(placement.dims) == x.dim():
        parts = zip(sizes, placement.dims, strict=True)
        sizes = [size if unsplit(dim) == dim else "split" for size, dim in parts]
    return f"[{', '.join(sizes)}] {dtype_name(x.dtype)}"


def _words(value: Any) -> str:
    """Describe an argument. Integer and bool tensors include a digest of their values."""
    if isinstance(value, Tensor):
        text = _local(value, None)
        if not value.is_floating_point() and not value.is_complex() and not value.is_meta:
            text += f" with values {facts.digest(value.flatten().tolist())}"
        return text
    return repr(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__
