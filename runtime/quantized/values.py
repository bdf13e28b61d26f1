"""How a weight's numbers are computed from what is stored of it.

Each function takes the stored tensors by role. All have the weight's shape or a length of 1, packed
numbers are unpacked, and integers are not negative if they were packed. Numbers are computed in
float32 or in the dtype of the scales, as the packages that write these formats do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]
Parameters = Mapping[str, Any]

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of a 4-bit float with 2 bits of exponent (OCP Microscaling Formats, 5.3.3)."""

_POSITIVE = [m / 8 if e == 0 else (1 + m / 8) * 2 ** (e - 1) for e in range(4) for m in range(8)]
FLOAT6 = (*_POSITIVE, *(-value for value in _POSITIVE))
"""The values of a 6-bit float with 2 bits of exponent (the same, 5.3.2)."""

BIAS = 127
"""What is subtracted from a stored exponent of 8 bits."""


def scaled(parts: Parts, parameters: Parameters) -> Tensor:
    """Return codes times scale, less a zero point if there is one.

    Inputs may have a scale, too, by which they are to be multiplied. The weight takes it here.
    """
    if "inputs" in parts:
        rest = {role: tensor for role, tensor in parts.items() if role != "inputs"}
        return scaled(rest, parameters) * parts["inputs"]
    codes, scale = parts["codes"], _scale(parts["scale"])
    if "zero" in parts:
        return (codes.float() - parts["zero"].float()).to(scale.dtype) * scale
    return codes.to(scale.dtype) * scale


def scaled_exactly(parts: Parts, parameters: Parameters) -> Tensor:
    """Return codes times scale, computed in float32."""
    return parts["codes"].float() * _scale(parts["scale"]).float()


def packed(parts: Parts, parameters: Parameters) -> Tensor:
    """Return codes less zero point, times scale; without a zero point it is the middle code."""
    zero = parts["zero"] if "zero" in parts else 1 << (int(parameters["bits"]) - 1)
    return (parts["codes"] - zero).to(parts["scale"].dtype) * parts["scale"]


def packed_signed(parts: Parts, parameters: Parameters) -> Tensor:
    """The same, where the zero point is not packed, and is stored less the middle code."""
    zero = parts["zero"].int() + (1 << (int(parameters["bits"]) - 1))
    return packed({**parts, "zero": zero}, parameters)


def float4(parts: Parts, parameters: Parameters) -> Tensor:
    """Return 4-bit floats times scale."""
    return _table(FLOAT4, parts["codes"]) * _scale(parts["scale"])


def float6(parts: Parts, parameters: Parameters) -> Tensor:
    """Return 6-bit floats times scale."""
    return _table(FLOAT6, parts["codes"]) * _scale(parts["scale"])


def nvfloat4(parts: Parts, parameters: Parameters) -> Tensor:
    """Return 4-bit floats times their group's scale, which one for all multiplies or divides."""
    scale = parts["scale"].float()
    of_group = scale * parts["factor"] if "factor" in parts else scale / parts["whole"].float()
    return _table(FLOAT4, parts["codes"]) * of_group


def levels(parts: Parts, parameters: Parameters) -> Tensor:
    """Return the level that each code names, times the greatest of its block.

    The greatest of blocks may be codes themselves, with a scale for several blocks.
    """
    absmax = parts["absmax"]
    if "outer" in parts:
        absmax = parts["ladder"][absmax.long()] * parts["outer"] + parameters["offset"]
    return (parts["levels"][parts["codes"].long()] * absmax).to(parameters["dtype"])


def int8(parts: Parts, parameters: Parameters) -> Tensor:
    """Return codes times the greatest of their row, for which 127 stands."""
    return parts["codes"] * (parts["scale"] / 127)


def shape_of(stored: bytes) -> dict[str, Any]:
    """Read the weight's rows and columns from two integers of 64 bits."""
    *_, rows, columns = torch.frombuffer(bytearray(stored), dtype=torch.int64).tolist()
    return {"out": rows, "in": columns}


def flat_state(stored: bytes) -> dict[str, Any]:
    """Read what bitsandbytes stores as JSON of a weight whose scales are not nested.

    Raises:
        ValueError: it says something else.
    """
    found = json.loads(stored)
    if "nested_blocksize" in found:
        raise ValueError("its scales are said to be nested, and are not stored so")
    return _flat(found)


def nested_state(stored: bytes) -> dict[str, Any]:
    """Read the same of a weight whose scales are nested."""
    found = json.loads(stored)
    outer = found["blocksize"] * index(found["nested_blocksize"])
    return {**_flat(found), "outer": outer, "offset": float(found["nested_offset"])}


def _flat(found: Any) -> dict[str, Any]:
    rows, columns = map(index, found["shape"])
    dtype = getattr(torch, found["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"'{found['dtype']:.40}' is not a dtype")
    return {"out": rows, "in": columns, "block": index(found["blocksize"]), "dtype": dtype}


def _scale(stored: Tensor) -> Tensor:
    """Return a scale as a number, if it is stored as an exponent."""
    if stored.dtype == torch.uint8:
        return (stored.float() - BIAS).exp2()
    return stored.float() if stored.dtype.itemsize == 1 else stored


def _table(values: tuple[float, ...], codes: Tensor) -> Tensor:
    return torch.tensor(values, device=codes.device)[codes.long()]
