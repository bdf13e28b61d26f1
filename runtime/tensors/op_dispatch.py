"""Runs ops on SplitTensors: on local tensors where that is correct, otherwise on full tensors.

Torch's own rules for DTensors are not used. They assume shards as `torch.chunk` makes them, and not
all are correct (a mean gives uneven shards equal weight). An elementwise op returns a SplitTensor
with the placements of an operand. Most other ops return a plain tensor that is full on every rank,
so a penalty on parameters can be added to the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwright.errors import UsageError
from shardwright.runtime.communication.collectives import all_reduce
from shardwright.runtime.communication.generators import draw_alike
from shardwright.runtime.tensors import layouts
from shardwright.runtime.tensors.op_table import REFUSED, kept_dims, kind_of, name_of, written
from shardwright.runtime.tensors.split_tensor import SplitTensor, ViewCopy

aten = torch.ops.aten

INSTEAD = (
    "take full tensors, w = shardwright.full_tensors(model, {name: p})[name], and put them back by "
    "p.copy_(shardwright.split_tensors(model, {name: w})[name]) under torch.no_grad()"
)


def dispatch(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `op`, which has a SplitTensor among its operands."""
    return _DONE[kind_of(op)](op, args, kwargs)


def _local(x: DTensor) -> Tensor:
    return x._local_tensor


def _is_split(x: Any) -> bool:
    return isinstance(x, DTensor) and not isinstance(x, ViewCopy)


def _full(x: Any) -> Tensor:
    """The full tensor of `x`, on every rank."""
    if not isinstance(x, DTensor):
        return x
    if not isinstance(x, SplitTensor) and not layouts.is_planned(x._spec):
        return x.full_tensor()  # a plain DTensor, maybe of another mesh
    return layouts.gathered(x._local_tensor, x._spec)


def _alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    return one is other or (
        one.placements == other.placements and one.shape == other.shape and one.mesh == other.mesh
    )


def _part(op: Any, x: Any, like: DTensor) -> Any:
    """The local tensor of an operand, sharded as `like` is. The operand may broadcast to `like`."""
    if isinstance(x, DTensor) and _alike(x._spec, like._spec):
        return x._local_tensor
    if not isinstance(x, Tensor) or x.dim() == 0 and not isinstance(x, DTensor):
        return x
    if not isinstance(x, DTensor):
        _check_full(op, x, like)
    return layouts.cut(_full(x), like._spec)


def _check_full(op: Any, x: Tensor, like: DTensor) -> None:
    """Check that a plain tensor is full, not local.

    Raises:
        UsageError: a dim has neither the full size nor size 1, or has the local size where `like`
            is sharded.
    """
    local = like._local_tensor.shape
    for size, full, part in zip(x.shape[::-1], like.shape[::-1], local[::-1], strict=False):
        if size not in (full, 1) or size == part != full:
            raise UsageError(
                f"{name_of(op)} of a tensor of a split model, of shape {list(like.shape)}, with a "
                f"plain one of shape {list(x.shape)} (this rank's part has {list(local)}): give a "
                "full tensor, or one of shardwright.split_tensors(model, {name: tensor})"
            )


def _wrap(op: Any, made: Any, like: DTensor) -> Any:
    """SplitTensors of local results, with the placements of `like`."""
    local = like._local_tensor.shape

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        assert x.shape == local, f"{op} does not go element by element"
        return SplitTensor.of(x, like._spec)

    return tree_map(one, made)


def _elementwise(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an elementwise op on local tensors.

    All operands are sharded as the tensor that is written, or as one operand. If there is none to
    follow, the op runs on full tensors.
    """
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    into = _written(op, args, kwargs)
    like: Any = into[0] if into else _layout_for(given)
    if not isinstance(like, DTensor) or isinstance(like, ViewCopy):
        if into and not isinstance(like, DTensor) and (split := _layout_for(given)) is not None:
            _check_full(op, like, split)
        return _on_full(op, args, kwargs)
    own, named = tree_map(lambda x: _part(op, x, like), (tuple(args), dict(kwargs)))
    made = op(*own, **named)
    return into[0] if into else _wrap(op, made, like)


def _layout_for(given: Sequence[Tensor]) -> DTensor | None:
    """The SplitTensor whose placements the result takes; None if the result is full."""
    split: Any = [x for x in given if _is_split(x)]
    if len(split) == len(given) and all(_alike(x._spec, split[0]._spec) for x in split[1:]):
        return split[0]
    try:
        shape = torch.broadcast_shapes(*(x.shape for x in given))
    except RuntimeError:
        return split[0] if split else None  # `_check_full` says why
    split = [x for x in split if x.shape == shape]
    return min(split, key=lambda x: x._spec.is_replicated(), default=None)


def _lists(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an elementwise op over lists. Tensors at the same index of all lists are combined."""
    lists = [x for x in (*args, *kwargs.values()) if _is_list(x)]
    size = max(map(len, lists))
    likes: list[DTensor | None] = []
    for i in range(size):
        together = [x[i] for x in lists if i < len(x) and isinstance(x[i], Tensor)]
        if written(op):
            likes.append(together[0] if isinstance(together[0], DTensor) else None)
        else:
            likes.append(_layout_for([x for x in together if x.dim()]))

    def part(x: Any, i: int) -> Any:
        if isinstance(x, ViewCopy) and x is likes[i]:
            _refuse_view(op)
        return _full(x) if (like := likes[i]) is None else _part(op, x, like)

    def parts(value: Any) -> Any:
        return [part(x, i) for i, x in enumerate(value)] if _is_list(value) else _full(value)

    made = op(*map(parts, args), **{name: parts(value) for name, value in kwargs.items()})
    if made is None:
        return None
    pairs = zip(made, likes, strict=True)
    return [x if like is None else _wrap(op, x, like) for x, like in pairs]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in value)


def _view(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view of the local tensor; otherwise a `ViewCopy` of the full one, which is read-only."""
    x = args[0]
    if isinstance(x, DTensor):
        kind: type[SplitTensor] = ViewCopy if isinstance(x, ViewCopy) else SplitTensor
        if op is aten.detach.default:  # of each gradient, in each backward pass
            return kind(op(x._local_tensor), x._spec, requires_grad=False)  # type: ignore[call-arg]
        if x._spec.is_replicated():
            made = op(x._local_tensor, *args[1:], **kwargs)
            return tree_map(lambda out: kind.of(out, x._spec, out.shape), made)
        if (kept := kept_dims(op, args, x.shape)) is not None:
            same = name_of(op) in ("view", "_unsafe_view", "expand")
            local = (
                aten.alias(x._local_tensor) if same else op(x._local_tensor, *args[1:], **kwargs)
            )
            if (spec := layouts.with_dims(x._spec, kept, local)) is not None:
                return SplitTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]
        full = (Replicate(),) * x.device_mesh.ndim
        spec = DTensorSpec(x.device_mesh, full, tensor_meta=x._spec.tensor_meta)
        made = op(_full(x), *args[1:], **kwargs)
        return tree_map(lambda out: ViewCopy.of(out, spec, out.shape), made)
    return _on_full(op, args, kwargs)


def _random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Draw for full tensors, after setting all generators to the state of the first rank's.

    Raises:
        UsageError: the code is compiled.
    """
    if torch.compiler.is_compiling():
        raise UsageError(
            f"{name_of(op)} for a parameter of a split model in compiled code: draw where it is "
            "not compiled"
        )
    first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor))
    for i in range(first.device_mesh.ndim):
        draw_alike(layouts.group_of(first._spec, i), first.device, kwargs.get("generator"))
    return _on_full(op, args, kwargs, like=first, reads="rrelu" in name_of(op))


def _on_full(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    like: DTensor | None = None,
    reads: bool = True,
) -> Any:
    """Run an op on full tensors. Each rank keeps its shard of tensors that are written.

    Args:
        op: The op.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        like: A tensor: results of its shape get its placements. Without it, results are plain.
        reads: Whether the op reads what it writes.
    """
    full: dict[int, Any] = {}
    into = [x for x in _written(op, args, kwargs) if isinstance(x, DTensor)]

    def is_written(x: DTensor) -> bool:
        return any(x is y for y in into)

    if any(isinstance(x, ViewCopy) for x in into):
        _refuse_view(op)

    def one(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        if id(x) not in full:
            own = _full(x) if reads or not is_written(x) else None
            if own is None:  # it is only written
                own = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            full[id(x)] = own.clone() if own is x._local_tensor and is_written(x) else own
        return full[id(x)]

    own, named = tree_map(one, (tuple(args), dict(kwargs)))
    made = op(*own, **named)
    if op.namespace == "c10d" and isinstance(made, tuple):
        made[-1].wait()  # its outputs are read next
    given = {id(full[id(x)]): x for x in into}
    for x in into:
        if full[id(x)].shape != x.shape:
            raise UsageError(
                f"{name_of(op)} changes the shape of a tensor of a split model: {INSTEAD}"
            )
        x._local_tensor.copy_(layouts.cut(full[id(x)], x._spec))

    def shown(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in given:
            return given[id(x)]
        if like is not None and _is_split(like) and x.shape == like.shape:
            return SplitTensor.of(layouts.cut(x, like._spec).contiguous(), like._spec)
        return x

    return tree_map(shown, made)


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that `op` writes to."""
    found = []
    for i in written(op):
        value = args[i] if i < len(args) else kwargs.get(op._schema.arguments[i].name)
        found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return found


def _refuse_view(op: Any) -> NoReturn:
    raise UsageError(
        f"{name_of(op)} writes to a view (rows, a reshape) of a tensor of a split model, of which "
        f"a rank has a part: the view is a copy, and what is written would be lost: {INSTEAD}"
    )


def _norm(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Norms of local tensors, with one all-reduce for all tensors that are sharded alike."""
    names = [a.name for a in op._schema.arguments[1:]]
    named = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    power, several = float(named.get("ord", 2)), isinstance(args[0], (list, tuple))
    if power <= 0 or named.get("dim") is not None or named.get("keepdim"):
        return _on_full(op, args, kwargs)
    tensors = [
        x if isinstance(x, SplitTensor) else _full(x) for x in (args[0] if several else args[:1])
    ]

    def own(x: Tensor) -> Tensor:
        part = layouts.counted_once(x._local_tensor, x._spec) if isinstance(x, DTensor) else x
        wide = torch.promote_types(named.get("dtype") or part.dtype, torch.float32)
        if not part.numel():
            return part.new_zeros((), dtype=wide).abs()
        return torch.linalg.vector_norm(part, power, dtype=wide)

    def joined(norms: Tensor, over: Callable[[Tensor, str], Tensor]) -> Tensor:
        if math.isinf(power):
            return over(norms, "max")
        return over(norms**power, "sum") ** (1 / power)

    found = _all_reduced(tensors, [own(x) for x in tensors], joined)
    dtypes = [(named.get("dtype") or x.dtype).to_real() for x in tensors]
    made = [x.to(dtype) for x, dtype in zip(found, dtypes, strict=True)]
    return made if several else made[0]


def _sum(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A sum over all dims: of the local tensor, then all-reduced. Other sums take full tensors."""
    x, dims = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    if dims or (len(args) > 2 and args[2]) or kwargs.get("keepdim") or not _is_split(x):
        return _on_full(op, args, kwargs)
    part, dtype = layouts.counted_once(x._local_tensor, x._spec), kwargs.get("dtype")
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else dtype
    found = _all_reduced([x], [part.sum(dtype=wide)], lambda own, over: over(own, "sum"))
    return found[0].to(dtype or x.dtype) if x.is_floating_point() else found[0]


def _all_reduced(
    tensors: Sequence[Any], own: Sequence[Tensor], joined: Callable[[Tensor, Any], Tensor]
) -> list[Tensor]:
    """Combine one number per tensor over its ranks.

    Tensors that are sharded over the same mesh dims, with numbers of one dtype and device, are
    combined together.

    Args:
        tensors: The tensors.
        own: The number of each local tensor.
        joined: Combines the numbers, by a function that all-reduces them.
    """
    together: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors):
        if isinstance(x, DTensor) and (dims := layouts.split_dims(x._spec)):
            key = (x.device_mesh, tuple(dims), own[i].dtype, own[i].device)
            together.setdefault(key, []).append(i)
    out = list(own)
    for (*_, dims, _, _), places in together.items():
        spec = tensors[places[0]]._spec

        def over(values: Tensor, reduce: str, spec: Any = spec, dims: Any = dims) -> Tensor:
            for dim in dims:
                values = all_reduce(values, layouts.group_of(spec, dim), reduce)
            return values

        values = joined(torch.stack([own[i] for i in places]), over)
        for i, value in zip(places, values.unbind(), strict=True):
            out[i] = value
    return out


def _unscale(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """GradScaler's op: unscale local gradients, and tell all ranks if one is not finite."""
    grads, found, scale = args
    op(tree_map_only(DTensor, _local, grads), found, scale, **kwargs)
    meshes = {x.device_mesh: x._spec for x in grads if isinstance(x, DTensor)}
    for spec in meshes.values():
        for dim in range(spec.mesh.ndim):
            found.copy_(all_reduce(found, layouts.group_of(spec, dim), "max"))


def _made_new(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A new tensor: with the placements of the first operand if shapes agree; otherwise plain."""
    x, size, *rest = args
    local = x._local_tensor
    if isinstance(x, ViewCopy) or tuple(size) != tuple(x.shape):
        return op(local, size, *rest, **kwargs)
    if name_of(op) == "new_empty_strided":
        rest = [local.stride()]
    return _wrap(op, op(local, local.shape, *rest, **kwargs), x)


def _on_local(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op about memory on local tensors."""
    return op(*tree_map_only(DTensor, _local, tuple(args)), **kwargs)


def _composite(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Decompose a composite op: only in inference mode does torch dispatch it undecomposed."""
    made = op.decompose(*args, **kwargs)
    return _on_full(op, args, kwargs) if made is NotImplemented else made


def _refused(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
    name = name_of(op)
    raise UsageError(f"{name} of a tensor of a split model: {REFUSED[name]}")


_DONE: dict[str, Callable[..., Any]] = {
    "elementwise": _elementwise,
    "lists": _lists,
    "view": _view,
    "random": _random,
    "norm": _norm,
    "sum": _sum,
    "made new": _made_new,
    "asks": _on_local,
    "unscale": _unscale,
    "refused": _refused,
    "composite": _composite,
    "full": _on_full,
}
