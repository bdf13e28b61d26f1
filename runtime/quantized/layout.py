"""Finds what a part of a weight needs of each stored tensor, and computes the part from it.

A part of a weight is given by the wanted indices of each of its dims, as in
`runtime/checkpoint/expressions.py`. A block, group or packed number that is partly wanted is read
in full. So a weight can be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.runtime.quantized.formats import ORDERS, STATE, Dim, Format, Part

Index = tuple[Tensor, ...]
"""Wanted indices for each dim."""
Shape = tuple[int, ...]
FLAT, FULL = "flat", "*"


class Mismatch(Exception):
    """The tensors are not those of this format and these parameters."""


@dataclass(frozen=True)
class Along:
    """A dim of a stored tensor, with numbers: the element for index i of `axis` is i // per.

    If `bits` is not 0, elements are packed in numbers of `width` bits, and `less` was subtracted.
    """

    axis: str
    size: int
    per: int = 1
    bits: int = 0
    order: Sequence[int] = ()
    width: int = 0
    less: int = 0
    through: str | None = None

    @property
    def straddles(self) -> bool:
        """Return whether an element may lie in two numbers."""
        return self.bits > 0 and self.width % self.bits > 0


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor of a weight: its key, its shape with one dim for each of `dims`."""

    key: str
    shape: Shape
    dims: tuple[Along, ...]


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight, and what is stored of it.

    Attributes:
        shape: the weight's own shape.
        axes: the name of each of its dims.
        parts: role -> stored tensor.
        beside: keys of tensors that hold its parameters, or belong to it but not to its numbers.
    """

    key: str
    format: Format
    parameters: Mapping[str, Any]
    shape: Shape
    axes: tuple[str, ...]
    parts: Mapping[str, StoredPart]
    beside: tuple[str, ...] = ()

    def stored_keys(self) -> list[str]:
        """Return the keys of its stored tensors."""
        return [*(part.key for part in self.parts.values()), *self.beside]


Stored = Mapping[str, tuple[str, Shape, int]]
"""Role -> (key, shape, bits of an element)."""


def resolve(
    key: str, form: Format, given: Mapping[str, Any], stored: Stored, state: Callable[[], bytes]
) -> QuantizedWeight:
    """Match stored tensors with a format.

    Args:
        key: the weight's key.
        form: the format.
        given: parameters from the config.
        stored: the tensors.
        state: reads the tensor that holds parameters.

    Raises:
        Mismatch: a shape is not what the format says.
    """
    found: dict[str, Any] = {**form.parameters, **given}
    if form.state is not None:
        found |= form.state(state())
    codes = form.parts[0]
    _, shape, width = stored[codes.role]
    names = [dim.axis for dim in codes.dims]
    lead: Shape = ()
    if FLAT not in names:
        lead, sizes = _split(codes, shape)
        for dim, size in zip(codes.dims, sizes, strict=True):
            bits = _number(dim.bits, found) if dim.bits else 0
            found.setdefault(dim.axis, size * width // bits if bits else size)
    parts: dict[str, StoredPart] = {}
    for part in form.parts:
        if part.role in stored and part.role != STATE:
            parts[part.role] = _resolve_part(part, stored[part.role], lead, found, stored)
    axes = (*map(str, range(len(lead))), *form.axes)
    whole = (*lead, *(found[axis] for axis in form.axes))
    return QuantizedWeight(key, form, found, whole, axes, parts)


def _resolve_part(
    part: Part, stored: tuple[str, Shape, int], lead: Shape, found: dict[str, Any], others: Stored
) -> StoredPart:
    """Compare one stored tensor with its line in the table; missing parameters go to `found`."""
    key, shape, width = stored
    if part.dims[0].axis.startswith(FULL):
        count = part.dims[0].axis.removeprefix(FULL)
        if count and prod(shape) != int(count):
            raise Mismatch(f"{key} has {prod(shape)} elements, not {count}")
        shape = (int(count),) if count else shape
        return StoredPart(key, shape, tuple(Along(FULL, n) for n in shape))
    ahead, sizes = _split(part, shape)
    if prod(shape) == 1:  # one scale for all, which may be stored with fewer dims
        ahead, sizes = (1,) * len(lead), (1,) * len(part.dims)
    if width != part.width and any(dim.bits for dim in part.dims):
        raise Mismatch(f"{key} has numbers of {width} bits, not of {part.width}")
    along = [Along(str(i), n) for i, n in enumerate(lead)]
    for dim, size in zip(part.dims, sizes, strict=True):
        along.append(_along(dim, size, width, found, others))
    expected = tuple(dim.size for dim in along)
    if (*ahead, *sizes) != expected:
        raise Mismatch(
            f"{key} has shape {list(shape)}, but a weight of {found['out']} x {found['in']}"
            f"{_said(part, found)} has {list(expected)}"
        )
    if part.dims[0].axis == FLAT and found["in"] % along[0].per == 0:
        rows, per = found["out"], along[0].per
        last = replace(along[0], axis="in", size=found["in"] // per)
        return StoredPart(key, (rows, last.size), (Along("out", rows), last))
    return StoredPart(key, expected, tuple(along))


def _along(dim: Dim, size: int, width: int, found: dict[str, Any], others: Stored) -> Along:
    length = found["out"] * found["in"] if dim.axis == FLAT else found[dim.axis]
    if dim.bits:
        bits = _number(dim.bits, found)
        if not 0 < bits <= width:
            raise Mismatch(f"elements of {bits} bits are not packed in {width}")
        if dim.order != "low" and len(ORDERS[dim.order]) * bits != width:
            raise Mismatch(f"elements of {bits} bits are not packed in this order")
        less, size = int(found.get(dim.less or "") or 0), -(-length * bits // width)
        out = Along(dim.axis, size, width // bits, bits, ORDERS[dim.order], width, less)
        if out.straddles and (less or dim.order != "low" or dim.axis == FLAT):
            raise Mismatch(f"elements of {bits} bits that are packed in {width} are not supported")
        return out
    if dim.through:
        along = _along(Dim(dim.axis, "cols"), size, width, found, others)
        return replace(along, per=1, through=dim.through) if dim.through in others else along
    if dim.per is None:
        return Along(dim.axis, length)
    if not dim.per.isdigit() and dim.per not in found:
        if not size or length % size:
            raise Mismatch(f"{size} scales do not divide {length} ({dim.axis})")
        found[dim.per] = length // size
    per = _number(dim.per, found) or max(length, 1)
    return Along(dim.axis, -(-length // per), per)


def _number(text: str, found: Mapping[str, Any]) -> int:
    """Return the number that the table names; 0 stands for the full length of the dim."""
    number = int(text) if text.isdigit() else found.get(text)
    if number is not None and (type(number) is not int or number < 1):
        raise Mismatch(f"{text} is {number!r:.40}, not a number above 0")
    return number or 0


def _split(part: Part, shape: Shape) -> tuple[Shape, Shape]:
    """Return the dims before those listed, and those listed; two may be stored for the last one."""
    if part.dims[-1].stored_as_two and len(shape) > 1:
        shape = (*shape[:-2], shape[-2] * shape[-1])
    if part.dims[0].axis == FLAT:
        shape = (prod(shape),)
    ahead = len(shape) - len(part.dims)
    if ahead < 0:
        shape, ahead = (*shape, *[1] * -ahead), 0
    return shape[:ahead], shape[ahead:]


def _said(part: Part, found: Mapping[str, Any]) -> str:
    rates = [str(found.get(d.per, d.per) or "all") for d in part.dims if d.per]
    return f" in blocks of {' x '.join(rates)}" if rates else ""


def stored_bits(form: Format, given: Mapping[str, Any], shape: Shape) -> Fraction:
    """Return the bits that a weight takes for each of its elements, with its scales.

    What the config does not say is taken to be one scale for each row.
    """
    found: dict[str, Any] = {"rows": 1, "cols": None, "bits": 4, "block": 64, "outer": 64 * 256}
    found |= {**form.parameters, **given}
    found |= dict(zip(form.axes, shape[-2:], strict=True))
    total = 0
    for part in form.parts:
        if part.optional or part.dims[0].axis.startswith(FULL):
            continue
        along = [_along(dim, 1, part.width, found, {}) for dim in part.dims]
        total += part.width * prod(dim.size for dim in along)
    return Fraction(total, max(prod(shape[-2:]), 1))


def block(form: Format, given: Mapping[str, Any]) -> tuple[int, int]:
    """Return how much of a weight's two last dims shares a scale; 0 for all, or if not known."""
    found: dict[str, Any] = {**form.parameters, **given}
    scale = next((part for part in form.parts if part.role == "scale"), None)
    rates = {"out": 0, "in": 0}
    for dim in scale.dims if scale is not None else ():
        per = "cols" if dim.through else dim.per
        rates[dim.axis] = 1 if per is None else _number(per, found)
    first, second = form.axes
    return rates[first], rates[second]


class Place(NamedTuple):
    """Where wanted indices are in a stored dim: what to read, and how to spread what was read."""

    read: Tensor
    spread: Tensor | None
    within: Tensor | None
    """For packed numbers: where each wanted element begins, in bits from the lowest."""
    beyond: Tensor | None = None
    """For elements that may lie in two numbers: as `spread`, for the second."""


def wanted(
    weight: QuantizedWeight, index: Index, read: Callable[[StoredPart, Index], Tensor]
) -> Parts:
    """Read what the part of a weight at `index` needs: each element of a stored tensor once.

    Args:
        weight: the weight.
        index: the wanted indices of each of its dims.
        read: returns the elements of a stored tensor at the indices of its dims.
    """
    out: dict[str, Tensor] = {}
    # Parts that lie where others say come behind them.
    roles = sorted(weight.parts.items(), key=lambda one: any(d.through for d in one[1].dims))
    for role, part in roles:
        places = _places(weight, role, index, out)
        out[role] = read(part, tuple(place.read for place in places))
    return out


Parts = dict[str, Tensor]


def computed(weight: QuantizedWeight, index: Index, parts: Parts) -> Tensor:
    """Return the part of a weight at `index`, from what `wanted` read for it."""
    spread = {role: _spread(weight, role, index, parts) for role in weight.parts}
    return weight.format.value(spread, weight.parameters)


def narrowed(weight: QuantizedWeight, index: Index, parts: Parts, some: Index) -> Parts:
    """Return what the part at `some` needs, of what `wanted` read for the part at `index`."""
    held = {
        weight.parts[role].key: (tensor, _places(weight, role, index, parts))
        for role, tensor in parts.items()
    }

    def read(part: StoredPart, at: Index) -> Tensor:
        tensor, places = held[part.key]
        for d, (place, needed) in enumerate(zip(places, at, strict=True)):
            tensor = selected(tensor, d, place.read, needed)
        return tensor

    return wanted(weight, some, read)


def _places(weight: QuantizedWeight, role: str, index: Index, parts: Parts) -> list[Place]:
    at = dict(zip(weight.axes, index, strict=True))
    out = []
    for dim in weight.parts[role].dims:
        if dim.axis == FULL:
            out.append(Place(torch.arange(dim.size), None, None))
            continue
        if dim.axis == FLAT:
            rows, columns = at["out"], at["in"]
            where = rows[:, None] * weight.parameters["in"] + columns
        else:
            where = at[dim.axis]
        if dim.through is not None:
            where = parts[dim.through].to(where.device, torch.int64)
            if len(where) and not 0 <= int(where.min()) <= int(where.max()) < dim.size:
                key = weight.parts[dim.through].key
                raise Mismatch(f"{key} names groups that {weight.parts[role].key} does not have")
        out.append(_place(dim, where))
    return out


def _place(dim: Along, where: Tensor) -> Place:
    if dim.per == 1 and not dim.bits and dim.through is None:
        return Place(where, None, None)
    within = None
    if dim.straddles:
        first, last = where * dim.bits // dim.width, ((where + 1) * dim.bits - 1) // dim.width
        read, both = torch.unique(torch.stack([first, last]), return_inverse=True)
        return Place(read, both[0], where * dim.bits % dim.width, both[1])
    if dim.bits:
        order = torch.tensor([*dim.order][: dim.per], device=where.device)
        within = order[where % dim.per] * dim.bits
    read, spread = torch.unique(where // dim.per, return_inverse=True)
    return Place(read, spread, within)


def _spread(weight: QuantizedWeight, role: str, index: Index, parts: Parts) -> Tensor:
    """Return a stored tensor with one element for each of the weight's, or a length of 1."""
    tensor, dims = parts[role], weight.parts[role].dims
    if any(dim.axis == FULL for dim in dims):
        return tensor
    places = _places(weight, role, index, parts)
    if dims[0].axis == FLAT:
        (place,) = places
        assert place.spread is not None
        tensor = tensor[place.spread]
        if place.within is not None:
            tensor = _unpacked(tensor, dims[0], place.within)
        return tensor
    for d, place in enumerate(places):
        beyond = None if place.beyond is None else _selected(tensor, d, place.beyond)
        if place.spread is not None and len(place.read) > 1:
            tensor = _selected(tensor, d, place.spread)
        if place.within is not None:
            shape = [-1 if i == d else 1 for i in range(tensor.dim())]
            if len(place.read) == 1:
                tensor = tensor.expand(
                    *(len(place.within) if i == d else -1 for i in range(len(shape)))
                )
            tensor = _unpacked(tensor, dims[d], place.within.view(shape), beyond)
    names = [dim.axis for dim in dims]
    missing = [axis for axis in weight.axes if axis not in names]
    tensor = tensor.reshape(*tensor.shape, *[1] * len(missing))
    names += missing
    return tensor.permute([names.index(axis) for axis in weight.axes])


def selected(tensor: Tensor, dim: int, held: Tensor, needed: Tensor) -> Tensor:
    """Return what `tensor`, which has the indices `held` of a dim, has at some of them."""
    if len(needed) == len(held):
        return tensor
    there, order = held.sort()
    return _selected(tensor, dim, order[torch.searchsorted(there, needed)])


def _selected(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    if tensor.dtype.itemsize > 1:
        return tensor.index_select(dim, index)
    return tensor.view(torch.uint8).index_select(dim, index).view(tensor.dtype)  # any 8-bit float


def _unpacked(tensor: Tensor, dim: Along, within: Tensor, beyond: Tensor | None = None) -> Tensor:
    mask = (1 << dim.bits) - 1
    if beyond is not None:  # what is not of the element in the second number is above its bits
        whole = (1 << dim.width) - 1
        first, second = (half.to(torch.int64) & whole for half in (tensor, beyond))
        return (((first >> within) | (second << (dim.width - within))) & mask).int()
    tensor = tensor.to(torch.int32)
    if dim.less:
        tensor = tensor + sum(dim.less << (dim.bits * place) for place in range(dim.per))
    return (tensor >> within.to(torch.int32)) & mask
