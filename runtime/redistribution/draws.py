"""Draws random numbers for shards of tensors: the numbers that the unsharded model would draw.

Generators have the same state on all ranks (`runtime/communication/generators.py`). Each rank draws
the numbers of the full tensor and keeps those of its part. All generators therefore stay in step,
and dropout drops what the unsharded model would drop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import UsageError
from shardwright.planner.contract.dims import Atom, Dim, dim_size, resolve
from shardwright.planner.contract.names import DRAWN_INTO, is_drawn_like
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import RandomNumbers
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution.lengths import Length, Lengths
from shardwright.runtime.redistribution.reshard import take_local
from shardwright.runtime.scopes import PerThread

aten = torch.ops.aten

PLAN_AGAIN = "plan the model again as it is now"


class Part:
    """One place where code draws random numbers, and which part of them this rank has.

    Args:
        drawn: What the plan says about this place.
        mesh: This rank's mesh.
        lengths: The model's lengths.
    """

    def __init__(self, drawn: RandomNumbers, mesh: Mesh, lengths: Lengths) -> None:
        self.dims, self.mesh, self.always = parse(drawn.placement).dims, mesh, drawn.always
        self.length = None if drawn.length is None else Length(lengths, drawn.length)

    def whole(self, sizes: Sequence[int]) -> Placement:
        """Return the placement of the full tensor of which this rank's part has these `sizes`.

        Raises:
            PlanError: no full tensor has such a part.
            UsageError: the number of dims differs from the plan's.
        """
        if len(sizes) != len(self.dims):
            raise UsageError(
                f"random numbers are drawn for a tensor of {len(sizes)} dims, where the plan has "
                f"'{Placement(self.dims)}': {PLAN_AGAIN}"
            )
        return Placement(tuple(map(self._whole, self.dims, sizes)))

    def _whole(self, dim: Dim, size: int) -> Dim:
        if isinstance(dim, Atom) and dim.size is None and dim.mesh and self.length is not None:
            return Atom(self.length.find(size, self.mesh[dim.mesh]), dim.mesh)
        return resolve(dim, size, self.mesh.coords)


class RandomDraws(TorchDispatchMode):
    """A mode in which a module's own code draws what it would draw in the unsharded model.

    Args:
        parts: The places where the module draws, in order.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts, self.number, self.module = parts, 0, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Draw for the full tensor and keep this rank's part; run all other ops unchanged."""
        kwargs = kwargs or {}
        own = _innermost.draws is self  # submodules draw for themselves
        if own and not any(isinstance(x, Tensor) for x in args[1:]):
            name = func._schema.name.removeprefix("aten::")
            into = name in DRAWN_INTO
            if into or is_drawn_like(name, func._overloadname):
                drawn = self._part(args[0], lambda whole: func(whole, *args[1:], **kwargs))
                return args[0].copy_(drawn) if into else drawn
        if own and func is aten.native_dropout.default:  # on GPUs
            x, p, train = args
            mask = self._part(x, lambda whole: func(torch.ones_like(whole), p, train)[1])
            return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask
        return func(*args, **kwargs)

    def _part(self, like: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's part of what `draw` makes of a new full tensor."""
        if self.number == len(self.parts):
            self.refuse()
        part = self.parts[self.number]
        self.number += 1
        layout = part.whole(like.shape)
        sizes = [dim_size(dim) or 0 for dim in layout.dims]
        # The full tensor has the part's memory format: numbers are drawn in memory order.
        order = list(range(like.ndim))
        if not like.is_contiguous():
            order.sort(key=lambda d: -like.stride(d))
        drawn = draw(torch.empty_permuted(sizes, order, dtype=like.dtype, device=like.device))
        return take_local(drawn, layout, part.mesh.coords)

    def refuse(self) -> None:
        """Raise because the code draws differently from when it was traced."""
        raise UsageError(
            f"a {self.module} draws random numbers for other tensors than those that the plan has "
            f"({len(self.parts)}): {PLAN_AGAIN}"
        )


_innermost: Any = PerThread(draws=None)
"""The draws of the module that runs; None if it draws for full tensors."""


@contextmanager
def drawing_for(module: nn.Module, parts: Sequence[Part] | None) -> Iterator[None]:
    """Run the code of `module` inside, which draws random numbers for `parts` if given.

    Raises:
        UsageError: it draws differently from the plan.
    """
    outer, draws = _innermost.draws, None
    try:
        if parts is None:
            _innermost.draws = None
            yield
            return
        draws = RandomDraws(parts)
        draws.module = type(module).__name__
        _innermost.draws = draws
        with sdpa_kernel(SDPBackend.MATH), draws:
            yield
    finally:
        _innermost.draws = outer
    if draws.number not in (0, len(draws.parts)):
        draws.refuse()
