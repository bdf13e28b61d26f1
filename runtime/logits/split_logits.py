"""`SplitLogits`: logits that stay sharded while the model computes its loss.

A model's own loss code gets an object that looks like the full logits and holds the local ones.
Pointwise functions run on the local logits, `cross_entropy` is vocabulary-parallel, and any other
function gathers first. When the model's forward returns, the object is sealed, so that no code
mistakes local logits for full ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.errors import ShardwrightError
from shardwright.planner.contract.dims import Range, covered, dim_size, local_ranges
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.logits.loss import vocab_parallel_cross_entropy
from shardwright.runtime.redistribution.reshard import ByDims, Reshard, last_dim
from shardwright.runtime.slots import StandsForTensor


class SealedLogitsError(ShardwrightError, TypeError):
    """Sharded logits were used as a tensor after the forward pass."""


class LossSeal:
    """Whether a forward pass has returned (`closed`); shared by all its split logits."""

    def __init__(self) -> None:
        self.closed = False


@dataclass(eq=False)
class SplitHead:
    """How the output of a head is sharded.

    Attributes:
        size: The number of classes.
        ranges: The classes of this rank's columns.
        groups: The groups over which the classes are sharded.
        whole: Gathers the classes.
    """

    size: int
    ranges: tuple[Range, ...]
    groups: tuple[Group, ...]
    whole: ByDims

    @classmethod
    def of(cls, reshard: Reshard | ByDims, mesh: Mesh) -> SplitHead | None:
        """The head, if `reshard` gathers logits that are sharded by class only; None otherwise."""
        if isinstance(reshard, ByDims):
            return None
        source, target = reshard.source, reshard.target
        *before, last = source.dims
        meshes = sorted(Placement((last,)).meshes)
        size = dim_size(last)
        splits = meshes and not Placement(tuple(before)).meshes and size is not None
        plain = not (source.partial or source.grad_partial or target.partial or target.grad_partial)
        if not (splits and plain and not target.meshes and all(covered(last, m) for m in meshes)):
            return None
        assert size is not None
        return cls(
            size,
            tuple(local_ranges(last, mesh.coords)),
            tuple(mesh[m] for m in meshes),
            last_dim(str(last), str(size), mesh),
        )


class SplitLogits(StandsForTensor):
    """Local logits that behave like the full ones, [..., classes]; not a tensor.

    `local` are the local logits. `whole()` gathers the full ones; all ranks must call it.
    """

    def __init__(self, local: Tensor, head: SplitHead, seal: LossSeal) -> None:
        self._local, self._head, self._seal = local, head, seal
        self._gathered: Tensor | None = None  # set once logits are written to

    @property
    def local(self) -> Tensor:
        """The local logits: [..., classes of this rank]."""
        return self._local

    def whole(self) -> Tensor:
        """The full logits on each rank: a collective that all ranks must call."""
        return self._head.whole(self._local) if self._gathered is None else self._gathered

    # Inside the model's forward: full sizes, functions of local logits, and all others.

    def _open(self) -> SplitLogits:
        if self._seal.closed:
            raise SealedLogitsError(
                "these logits are split over ranks and the forward pass has ended: call "
                "`.whole()` on all ranks to gather them, or run the model without labels"
            )
        return self

    def _with(self, local: Tensor) -> SplitLogits:
        return SplitLogits(local, self._head, self._seal)

    @property
    def shape(self) -> torch.Size:
        """The full shape."""
        return torch.Size((*self._open()._local.shape[:-1], self._head.size))

    def size(self, dim: int | None = None) -> Any:
        """The full shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dims."""
        return self._open()._local.dim()

    ndim = property(dim)

    def numel(self) -> int:
        """Number of elements of the full logits."""
        return _product(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def view(self, *sizes: Any) -> Any:
        """As `Tensor.view`: local if only dims before the last change, otherwise gathered."""
        return self._reshaped("view", sizes)

    def reshape(self, *sizes: Any) -> Any:
        """As `Tensor.reshape`: local if only dims before the last change, otherwise gathered."""
        return self._reshaped("reshape", sizes)

    def _reshaped(self, name: str, sizes: tuple[Any, ...]) -> Any:
        x = self._open()
        flat = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        if self._gathered is None and flat and not isinstance(flat[0], torch.dtype):
            rest = _product(flat[:-1])
            last = flat[-1]
            if last == -1 and -1 not in flat[:-1] and rest * self._head.size == self.numel():
                last = self._head.size
            if last == self._head.size:
                return self._with(getattr(x._local, name)(*flat[:-1], x._local.shape[-1]))
        return getattr(self.whole(), name)(*sizes)

    def __getitem__(self, key: Any) -> Any:
        x = self._open()
        if self._gathered is None and _spares_last(key, x._local.dim()):
            return self._with(x._local[key])
        return self.whole()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._open()
        self._gathered = self.whole().clone()
        self._gathered[key] = value

    def __getattr__(self, name: str) -> Any:
        """Other members of a tensor: pointwise methods are local, the others gather."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"'SplitLogits' has no attribute '{name}'")
        self._open()
        if name in _LIKE_LOCAL:
            return getattr(self._local, name)
        found = getattr(Tensor, name)
        if not callable(found):
            return getattr(self.whole(), name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return _dispatch(found, (self, *args), kwargs)

        return method

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, tuple(args), kwargs or {})

    def __repr__(self) -> str:
        state = "sealed" if self._seal.closed else "open"
        sizes = [*self._local.shape[:-1], self._head.size]
        return f"SplitLogits({sizes}, local {list(self._local.shape)}, {state})"


_LIKE_LOCAL = set("dtype device is_cuda requires_grad layout is_floating_point is_meta".split())

# Pointwise functions, by their name in both torch and Tensor. In-place ones are left out: they
# would have to write to the local logits and to full ones gathered from them.
_POINTWISE = set(
    """abs add bfloat16 clamp clip clone contiguous cpu cuda detach div divide double exp float
    half hardtanh log mul multiply nan_to_num neg negative pow relu rsub sigmoid silu square sub
    subtract tanh to true_divide __abs__ __add__ __mul__ __neg__ __pow__ __radd__ __rmul__ __rsub__
    __rtruediv__ __sub__ __truediv__""".split()
)


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: SplitLogits, *args: Any, **kwargs: Any) -> Any:
        return _dispatch(getattr(Tensor, name), (self, *args), kwargs)

    operator.__name__ = name
    return operator


# Python looks up operators on the class.
OPERATORS = """__abs__ __add__ __eq__ __ge__ __gt__ __iter__ __le__ __lt__ __matmul__ __mul__ __ne__
    __neg__ __pow__ __radd__ __rmatmul__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__
    __truediv__ __bool__ __float__ __int__ __array__ __contains__ __floordiv__ __mod__
    __reduce_ex__"""
for _name in OPERATORS.split():
    setattr(SplitLogits, _name, _operator(_name))
SplitLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    for value in (*args, *kwargs.values()):
        if isinstance(value, SplitLogits):
            value._open()
    if func is F.cross_entropy:
        return _cross_entropy(*args, **kwargs)
    if name in _POINTWISE:
        out = _pointwise(func, args, kwargs)
        if out is not None:
            return out
    args = tuple(_whole(a) for a in args)
    return func(*args, **{k: _whole(v) for k, v in kwargs.items()})


def _whole(value: Any) -> Any:
    if isinstance(value, SplitLogits):
        return value._open().whole()
    if type(value) in (list, tuple):
        return type(value)(_whole(v) for v in value)
    return value


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitLogits | None:
    """Run `func` on local logits; None if another operand differs between classes."""
    like: SplitLogits | None = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, SplitLogits):
            if value._gathered is not None or (like is not None and value._head is not like._head):
                return None
            like = value
        elif isinstance(value, Tensor) and value.dim() and value.shape[-1] != 1:
            return None
    assert like is not None
    local = [a._local if isinstance(a, SplitLogits) else a for a in args]
    named = {k: v._local if isinstance(v, SplitLogits) else v for k, v in kwargs.items()}
    out = func(*local, **named)
    # Operands with more dims, or with sizes of 1 before the last, broadcast as for full logits.
    return like._with(out)


OF_CROSS_ENTROPY = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "label_smoothing",
)
"""The arguments of `F.cross_entropy`, in their order."""


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    """`F.cross_entropy`; sharded if classes are the last dim and targets are indices."""
    given = dict(zip(OF_CROSS_ENTROPY, args, strict=False), **kwargs)
    logits, target = given["input"], given["target"]
    splits = (
        isinstance(logits, SplitLogits)
        and logits._gathered is None
        and logits.dim() in (1, 2)
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and target.shape == logits.shape[:-1]
        and given.get("size_average") is None
        and given.get("reduce") is None
    )
    if not splits:
        return F.cross_entropy(**{name: _whole(value) for name, value in given.items()})
    head, old = logits._head, ("input", "target", "size_average", "reduce")
    options = {name: value for name, value in given.items() if name not in old}
    return vocab_parallel_cross_entropy(
        logits._local, target, head.ranges, head.groups, classes=head.size, **options
    )


def _spares_last(key: Any, dims: int) -> bool:
    """Whether indexing with `key` keeps all of the last of `dims` dims, as the last."""
    keys = key if isinstance(key, tuple) else (key,)
    used, behind = 0, False
    for at, k in enumerate(keys):
        if k is Ellipsis:
            behind, used = True, dims - sum(_uses(r) for r in keys[at + 1 :])
        elif behind and used >= dims and k is None:
            return False
        else:
            used += _uses(k)
            if used >= dims and not (isinstance(k, slice) and k == slice(None)):
                return False
    # Separated index tensors move dims to the front; the last dim stays last.
    return used <= dims


def _product(sizes: Sequence[int]) -> int:
    # torch.compile does not support math.prod of symbolic sizes.
    out = 1
    for size in sizes:
        out = out * size
    return out


def _uses(key: Any) -> int:
    if key is None or key is Ellipsis:
        return 0
    if isinstance(key, Tensor) and key.dtype == torch.bool:
        return key.dim()
    return 1
