"""Calls of ops that read or write at positions, and of factories."""

import torch

from ..draw import Draw, Example, Maker, Makers, T, call


def _indexed(d: Draw) -> tuple[tuple[int, ...], list[T | None], tuple[int, ...]]:
    """A shape, one to three index tensors anywhere, and the shape that they select."""
    shape = tuple(n + 1 for n in d.shape(1, 4))
    used = sorted(d.order(len(shape))[: d.size(1, min(3, len(shape)))])
    index = d.shape(0, 2)
    first = d.pick(*used)
    shapes = {u: index if u == first else d.broadcast(index) for u in used}
    at = [T(shapes[i], "integers", n) if i in used else None for i, n in enumerate(shape)]
    if d.flag():
        at = at[: used[-1] + 1]
    together = used == list(range(used[0], used[-1] + 1))
    kept = [n for i, n in enumerate(shape) if i not in used]
    where = used[0] if together else 0
    return shape, at, (*kept[:where], *index, *kept[where:])


def _index(op: str) -> Maker:
    def make(d: Draw) -> Example:
        shape, at, _ = _indexed(d)
        return call(op, T(shape), at)

    return make


def _index_put(op: str) -> Maker:
    def make(d: Draw) -> Example:
        # Accumulate: without it, which of several values for one place is kept is not defined.
        shape, at, selected = _indexed(d)
        return call(op, T(shape), at, T(d.broadcast(selected)), True)

    return make


def _index_put_once(op: str) -> Maker:
    def make(d: Draw) -> Example:
        n, m = d.size(3, 6), d.size()
        k = d.size(1, n)
        return call(op, T((n, m)), [T((k,), "distinct", n)], T(d.broadcast((k, m))), False)

    return make


def _put_alike(d: Draw) -> Example:
    """Some dims by a mask, and in all places the same values."""
    head, masked, tail = d.shape(0, 1), d.shape(1, 2), d.shape(0, 2)
    at = [None] * len(head) + [T(masked, "bool")]
    values = d.broadcast((*head, 1, *tail)) if d.flag() else d.broadcast(tail)
    return call("index_put", T((*head, *masked, *tail)), at, T(values), d.flag())


def _put_rows(d: Draw) -> Example:
    """A dim by a mask, and in each place another row of the values."""
    head, n, tail = d.shape(0, 1), d.size(2, 5), d.shape(0, 2)
    count = d.size(1, n)
    at = [None] * len(head) + [T((n,), "so many", count)]
    values = T((*d.broadcast(head), count, *tail))
    return call("index_put", T((*head, n, *tail)), at, values, d.flag())


def _along(d: Draw) -> tuple[tuple[int, ...], int, T]:
    """A shape, a dim of it, and an index along that."""
    shape = d.shape(1, 3)
    dim = d.dim(len(shape))
    index = list(shape)
    index[dim] = d.size()
    return shape, dim, T(tuple(index), "integers", shape[dim])


def _gather(d: Draw) -> Example:
    shape, dim, index = _along(d)
    return call("gather", T(shape), dim, index)


def _index_select(d: Draw) -> Example:
    shape = d.shape(1, 3)
    dim = d.dim(len(shape))
    index = T(d.pick((), (d.size(),)), "integers", shape[dim])
    return call("index_select", T(shape), dim, index)


def _scatter(d: Draw) -> Example:
    # One position each: which of several values is kept is not defined.
    n, m = d.size(2, 5), d.size(2, 5)
    value = d.pick(0, 1.5, None)
    index = T((1, m), "integers", n)
    if value is None:
        return call("scatter.src", T((n, m)), 0, index, T((1, m)))
    return call("scatter.value", T((n, m)), 0, index, value)


def _scatter_reduce(d: Draw) -> Example:
    shape, dim, index = _along(d)
    how = d.pick("add", "multiply")
    return call("scatter.reduce", T(shape), dim, index, T(index.shape), reduce=how)


def _scatter_value_reduce(d: Draw) -> Example:
    shape, dim, index = _along(d)
    return call("scatter.value_reduce", T(shape), dim, index, 2.0, reduce=d.pick("add", "multiply"))


def _scatter_add(d: Draw) -> Example:
    shape, dim, index = _along(d)
    return call("scatter_add", T(shape), dim, index, T(index.shape))


def _scatter_two(d: Draw) -> Example:
    shape, dim, index = _along(d)
    how = d.pick("sum", "sum", "prod", "amax", "mean")
    values = T(index.shape)
    return call("scatter_reduce.two", T(shape), dim, index, values, how, include_self=d.flag())


def _embedding(d: Draw) -> Example:
    v, e = d.size(3, 7), d.size()
    padding = d.pick(-1, d.size(0, v - 1))
    return call("embedding", T((v, e)), T(d.shape(0, 2), "integers", v), padding)


def _embedding_bag(op: str) -> Maker:
    def make(d: Draw) -> Example:
        v, e, n, mode = d.size(3, 7), d.size(), d.size(3, 6), d.size(0, 2)
        weights = T((n,)) if mode == 0 and d.flag() else None
        entries = T((n,), "integers", v), T((d.size(1, 3),), "starts", n)
        return call(op, T((v, e)), *entries, False, mode, False, weights)

    return make


def _grid_sample(op: str) -> Maker:
    def make(d: Draw) -> Example:
        n, c, depth = d.size(), d.size(), int(op[-2])
        space, out = (tuple(d.size(2, 4) for _ in range(depth)) for _ in range(2))
        grid = T((n, *out, depth))
        return call(op, T((n, c, *space)), grid, 0, d.size(0, 2), d.flag())

    return make


def _bucketize(d: Draw) -> Example:
    return call("bucketize.Tensor", T(d.shape(0, 3)), T((4,), "ascending"), right=d.flag())


def _one_hot(d: Draw) -> Example:
    n = d.size(2, 5)
    return call("one_hot", T(d.shape(0, 2), "integers", n), n)


def _factory(op: str, *rest: object) -> Maker:
    return lambda d: call(op, list(d.shape(0, 3)), *rest, dtype=torch.float64)


def _permuted(d: Draw) -> Example:
    shape = d.shape(0, 3)
    return call("empty_permuted", list(shape), d.order(len(shape)), dtype=torch.float64)


def _like(op: str, *rest: object) -> Maker:
    return lambda d: call(op, T(d.shape(0, 2)), list(d.shape(0, 3)), *rest)


EXAMPLES: Makers = {
    "_embedding_bag": [_embedding_bag("_embedding_bag")],
    "_embedding_bag_forward_only": [_embedding_bag("_embedding_bag_forward_only")],
    "_unsafe_index": [_index("_unsafe_index.Tensor")],
    "_unsafe_index_put": [_index_put("_unsafe_index_put"), _index_put_once("_unsafe_index_put")],
    "arange": [lambda d: call("arange", d.size())],
    "bucketize": [_bucketize],
    "embedding": [_embedding],
    "empty": [_factory("empty.memory_format")],
    "empty_permuted": [_permuted],
    "eye": [lambda d: call("eye.m", d.size(), d.size())],
    "full": [_factory("full", 2.5), _factory("full", 0.0)],
    "gather": [_gather],
    "grid_sampler_2d": [_grid_sample("grid_sampler_2d")],
    "grid_sampler_3d": [_grid_sample("grid_sampler_3d")],
    "index": [_index("index.Tensor"), _index("index.Tensor")],
    "index_put": [_index_put("index_put"), _index_put_once("index_put"), _put_alike, _put_rows],
    "index_select": [_index_select],
    "linspace": [lambda d: call("linspace", 0, 1, d.size())],
    "new_empty": [_like("new_empty")],
    "new_full": [_like("new_full", 2.5), _like("new_full", 0.0)],
    "new_ones": [_like("new_ones")],
    "new_zeros": [_like("new_zeros")],
    "one_hot": [_one_hot],
    "ones": [_factory("ones")],
    "rand": [_factory("rand")],
    "randint": [lambda d: call("randint", 9, list(d.shape(0, 3)))],
    "randn": [_factory("randn")],
    "randperm": [lambda d: call("randperm", d.size())],
    "scalar_tensor": [lambda d: call("scalar_tensor", 1.5)],
    "scatter": [_scatter, _scatter_reduce, _scatter_value_reduce],
    "scatter_add": [_scatter_add],
    "scatter_reduce": [_scatter_two],
    "zeros": [_factory("zeros")],
}
NO_RULE: list[Example] = [
    call("index.Tensor", T((3, 4)), [T((3,), "bool")]),
    call("index_put", T((3, 4)), [T((3,), "bool"), T((1,), "integers", 4)], T(())),
    call("index_put", T((3, 4)), [T((), "bool")], T(())),
    call("index_select", T(()), 0, T((1,), "integers", 1)),
    call("gather", T(()), 0, T((), "integers", 1)),
    call("gather", T((3, 4)), 0, T((2, 3), "integers", 3)),
    call("scatter_add", T((3, 4)), 0, T((2, 4), "integers", 3), T((3, 4))),
]
