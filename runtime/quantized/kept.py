"""`KeptWeight`: a parameter that is held as it is stored, and computed by each op that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.errors import UsageError
from shardwright.runtime.quantized import layout
from shardwright.runtime.quantized.layout import Index, Parts, QuantizedWeight

aten: Any = torch.ops.aten

Runs = tuple[tuple[range, ...], ...]
"""For each dim, the wanted indices as runs of consecutive ones."""
AT_ONCE = 1 << 24
"""Elements that are computed at a time."""


@dataclass(eq=False)
class Held:
    """What a rank holds of one parameter.

    Attributes:
        make: computes the elements at the indices of each dim; `read` returns each piece of them,
            in a fixed order.
        index: the rank's indices of each dim.
        pieces: the stored parts of each piece, or the piece itself if it is not quantized.
        stored: reads each tensor that is stored of the full parameter, by its key.
    """

    make: Callable[[Index, Callable[[str, Index], Tensor]], Tensor]
    index: Index
    pieces: list[Piece] = field(default_factory=list)
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that are held."""
        for piece in self.pieces:
            yield from piece.parts.values()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Compute the local tensor."""
        pieces = iter(self.pieces)
        made = self.make(self.index, lambda key, at: next(pieces).dense(dtype))
        return made.to(dtype).contiguous()

    def selected(self, dtype: torch.dtype, dim: int, place: int) -> Tensor:
        """Compute the local tensor at one place of a dim, such as one expert of a stack."""
        one = self.index[dim][place].unsqueeze(0)

        def read(key: str, at: Index) -> Tensor:
            piece = next(p for p in self.pieces if p.key == key and p.holds(at))
            return piece.dense(dtype, at)

        made = self.make((*self.index[:dim], one, *self.index[dim + 1 :]), read)
        return made.to(dtype).squeeze(dim)

    def moved(self, device: torch.device) -> Held:
        """Return the same on another device."""
        return replace(self, pieces=[piece.moved(device) for piece in self.pieces])


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint.

    Attributes:
        nbytes: its size.
        read: returns it in full, from the open file.
        quantization: the checkpoint's `quantization_config`.
    """

    nbytes: int
    read: Callable[[], Tensor]
    quantization: Mapping[str, Any]


@dataclass(eq=False)
class Piece:
    """A part of one stored weight, which is not quantized if `weight` is None."""

    key: str
    weight: QuantizedWeight | None
    runs: Runs
    parts: Parts

    @classmethod
    def of(cls, key: str, weight: QuantizedWeight | None, index: Index, parts: Parts) -> Piece:
        """Hold `parts` of the weight's elements at `index`."""
        return cls(key, weight, tuple(map(_runs, index)), parts)

    def holds(self, at: Index) -> bool:
        """Return whether all elements at these indices are held."""
        held = zip(at, self.runs, strict=True)
        return all(bool(torch.isin(i, _index(runs, i.device)).all()) for i, runs in held)

    def dense(self, dtype: torch.dtype, at: Index | None = None) -> Tensor:
        """Compute the elements, or some; `AT_ONCE`, for that takes far more bytes than `dtype`."""
        device = next(iter(self.parts.values())).device
        own = tuple(_index(runs, device) for runs in self.runs)
        index = own if at is None else tuple(i.to(device) for i in at)
        if self.weight is None:
            tensor = self.parts[""]
            for d, (i, held) in enumerate(zip(index, own, strict=True)):
                tensor = layout.selected(tensor, d, held, i)
            return tensor
        shape = [len(i) for i in index]
        dim = next((d for d, n in enumerate(shape) if n > 1), 0)
        step = max(AT_ONCE * shape[dim] // max(prod(shape), 1), 1)
        if step >= shape[dim]:
            parts = (
                self.parts if at is None else layout.narrowed(self.weight, own, self.parts, index)
            )
            return layout.computed(self.weight, index, parts)
        out = torch.empty(shape, dtype=dtype, device=device)
        for piece in torch.arange(shape[dim], device=device).split(step):
            some = (*index[:dim], index[dim][piece], *index[dim + 1 :])
            parts = layout.narrowed(self.weight, own, self.parts, some)
            out.index_copy_(dim, piece, layout.computed(self.weight, some, parts).to(dtype))
        return out

    def moved(self, device: torch.device) -> Piece:
        """Return the same on another device."""
        parts = {role: tensor.to(device) for role, tensor in self.parts.items()}
        return replace(self, parts=parts)


def _runs(index: Tensor) -> tuple[range, ...]:
    if not len(index):
        return ()
    breaks = torch.where(index.diff() != 1)[0] + 1
    return tuple(
        range(int(run[0]), int(run[-1]) + 1) for run in index.tensor_split(breaks) if len(run)
    )


def _index(runs: Sequence[range], device: torch.device) -> Tensor:
    pieces = [torch.arange(run.start, run.stop, device=device) for run in runs]
    return torch.cat(pieces) if pieces else torch.arange(0, device=device)


class KeptWeight(Tensor):
    """A frozen tensor that is held as it is stored. Transposing it computes nothing.

    Selecting one of a stack computes that one. Autograd keeps what is stored, not the computed
    tensor, for the backward pass.
    """

    held: Held
    dims: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, held: Held, shape: Sequence[int], dtype: torch.dtype, dims: Sequence[int] | None = None
    ) -> KeptWeight:
        """Make the tensor of `shape` whose dim i is dim `dims[i]` of the one that is computed."""
        order = tuple(dims if dims is not None else range(len(shape)))
        sizes = [shape[order.index(d)] for d in range(len(shape))]  # of the one that is computed
        strides = [prod(sizes[d + 1 :]) for d in order]
        out = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides, dtype=dtype, device=next(held.tensors()).device
        )
        out.held, out.dims = held, order
        return out

    def dense(self) -> Tensor:
        """Compute the tensor."""
        return self.held.dense(self.dtype).permute(self.dims)

    @property
    def held_bytes(self) -> int:
        """Return the bytes that are held."""
        return sum(tensor.nbytes for tensor in self.held.tensors())

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on computed tensors; a view that only orders dims stays as it is stored.

        Raises:
            UsageError: the op writes to the tensor.
        """
        kwargs, first = kwargs or {}, args[0] if args else None
        if _writes(op, args, kwargs):
            if op is aten.copy_.default and _is_same(first, args[1]):
                return first
            raise UsageError(
                f"{op} writes to a quantized weight that is held as it is stored, and is frozen: "
                "load the model with dequantize=True"
            )
        if isinstance(first, KeptWeight) and (dims := _ordered(op, first, args, kwargs)):
            shape = [first.shape[d] for d in dims]
            return cls(first.held, shape, first.dtype, [first.dims[d] for d in dims])
        if op is aten.select.int and isinstance(first, KeptWeight):
            dim = args[1] % first.dim()
            order = [first.dims[d] for d in range(first.dim()) if d != dim]
            one = first.held.selected(first.dtype, first.dims[dim], args[2] % first.shape[dim])
            return one.permute([sorted(order).index(d) for d in order])
        if op is aten._to_copy.default and isinstance(first, KeptWeight):
            to = kwargs.get("device") or first.device
            dtype = kwargs.get("dtype") or first.dtype
            return cls(first.held.moved(torch.device(to)), first.shape, dtype, first.dims)

        def shown(value: Any) -> Any:
            return value.dense() if isinstance(value, KeptWeight) else value

        named = {key: shown(value) for key, value in kwargs.items()}
        return op(*tree_map(shown, args), **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a quantized weight that is held as it is stored cannot be pickled: write the model "
            "with shardwright.save, or load it with dequantize=True"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptWeight:
        """Return another tensor that shares what is held: it never changes."""
        memo[id(self)] = out = KeptWeight(self.held, self.shape, self.dtype, self.dims)
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe it without computing it."""
        return f"KeptWeight({list(self.shape)}, {self.dtype}, {self.held_bytes} bytes)"


def _writes(op: Any, args: Any, kwargs: Any) -> bool:
    """Return whether `op` writes to a kept weight."""
    if not op._schema.is_mutable:
        return False
    named = {**dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}
    written = (a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write)
    return any(isinstance(v, KeptWeight) for name in written for v in tree_leaves(named.get(name)))


def _is_same(one: Any, other: Any) -> bool:
    return isinstance(other, KeptWeight) and (one.held, one.dims) == (other.held, other.dims)


def _ordered(op: Any, tensor: Tensor, args: Any, kwargs: Any) -> list[int] | None:
    """Return the order of dims that `op` gives `tensor`; None if it does something else."""
    dims = list(range(tensor.dim()))
    as_it_is = kwargs.get("memory_format") in (None, torch.preserve_format)
    if not as_it_is and not tensor.is_contiguous():
        return None
    if op in (aten.detach.default, aten.alias.default, aten.clone.default):
        return dims
    if op is aten.t.default:
        return dims[::-1]
    if op is aten.transpose.int:
        a, b = args[1] % len(dims), args[2] % len(dims)
        dims[a], dims[b] = dims[b], dims[a]
        return dims
    if op is aten.permute.default:
        return [d % len(dims) for d in args[1]]
    return None
