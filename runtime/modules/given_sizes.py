"""`GivenSizes`: replaces full sizes by local ones in the arguments of a call in a module's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import Atom, Dim, dim_size, resolve
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.notation import parse


class GivenSizes:
    """The sizes of one call.

    Args:
        call: The name of the call.
        dims: The full sizes and how they are sharded, as notation; `?` is left unchanged.
        coords: The coordinates of this rank.
        path: The name of the module whose code has the call.
    """

    def __init__(self, call: str, dims: str, coords: Coords, path: str) -> None:
        self.where, self.coords = f"{call} in the code of '{path}'", coords
        self.dims: list[tuple[Dim, int | None, int | None] | None] = [
            None if dim == Atom(None) else (dim, dim_size(dim), dim_size(dim, coords))
            for dim in parse(dims).dims
        ]

    def local(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the call with local sizes.

        The sizes are those in the first list or tuple. If there is none, they are the arguments
        themselves, after a leading tensor.

        Raises:
            PlanError: the code computed other sizes than in the plan.
        """
        for i, value in enumerate(given):
            if isinstance(value, (list, tuple)):
                return (*given[:i], tuple(self._sizes(value)), *given[i + 1 :])
        start = 1 if given and isinstance(given[0], Tensor) else 0
        return (*given[:start], *self._sizes(given[start:]))

    def _sizes(self, sizes: Sequence[Any]) -> Iterator[Any]:
        if len(sizes) < len(self.dims):
            raise PlanError(f"{self.where} has {len(sizes)} sizes, the plan {len(self.dims)}")
        for known, size in zip(self.dims, sizes, strict=False):
            if known is None:
                yield size
                continue
            dim, whole, local = known
            yield local if size == whole else self._local(dim, size)
        yield from sizes[len(self.dims) :]

    def _local(self, dim: Dim, size: int) -> int | None:
        """The local size of a dim whose full `size` is known only at run time."""
        try:
            return dim_size(resolve(dim, size), self.coords)
        except PlanError as error:
            raise PlanError(f"{self.where}: {error}") from None
