"""Which parameters, inputs or calls the tensors of a run come from.

Both sides of a branch may make the same calls on equal shapes, but on other tensors:
`[self.up.bias, self.shift][int(h.shape[-1] > 40)]`. The call log therefore has the origins of what
a call is given. A view has that of its base. What the runtime makes, such as the result of a
redistribution, has none, and is not compared.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwright.planner.trace.record.op_tensors import tensors_in

Origin = frozenset[str]
Origins = tuple[Origin, ...]

UNKNOWN = Origin()


def origins_of(values: Any) -> Origins:
    """Return the origin of each tensor in arguments or results; `UNKNOWN` if it has none."""
    return tuple(_origin(x) for x in tensors_in(values))


def set_origin(values: Any, origin: Origin) -> None:
    """Note the origin of each tensor in results."""
    for x in tensors_in(values):
        x._shardwright_origin = origin  # type: ignore[attr-defined]


def keep_origin(values: Any, base: Any) -> None:
    """Note that results are views, copies or pieces of the tensor `base`."""
    if isinstance(base, Tensor) and (origin := _origin(base)):
        set_origin(values, origin)
        for i, piece in enumerate(values if isinstance(values, (tuple, list)) else ()):
            set_origin(piece, Origin(f"{name}, piece {i}" for name in origin))


def name_parameters(root: nn.Module) -> None:
    """Note the names of parameters and buffers of `root`; those of tied ones have several."""
    for path, module in root.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                set_origin(tensor, _origin(tensor) | {f"{path}.{name}"})


def agree(some: Origins, others: Origins) -> bool:
    """Whether tensors may come from the same: those whose origins are known do."""
    pairs = zip(some, others, strict=False)
    return all(not (a and b) or not a.isdisjoint(b) for a, b in pairs)


def _origin(tensor: Tensor) -> Origin:
    return getattr(tensor, "_shardwright_origin", UNKNOWN)
