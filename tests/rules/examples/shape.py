"""Calls of ops that move, split, join or copy."""

from math import prod

from ..draw import Draw, Example, Maker, Makers, T, call


def _group(d: Draw, factors: list[int]) -> list[int]:
    """Dims made of consecutive factors, with ones between."""
    out = [1]
    for factor in factors:
        if d.flag():
            out.append(1)
        out[-1] *= factor
    return out[1:] if out[0] == 1 and d.flag() else out


def _view(op: str) -> Maker:
    def make(d: Draw) -> Example:
        factors = [d.size(1, 4) for _ in range(d.size(0, 4))]
        return call(op, T(tuple(_group(d, factors))), _group(d, factors))

    return make


def _view_across(op: str) -> Maker:
    """Dims in the middle that have no common refinement."""

    def make(d: Draw) -> Example:
        a, b = d.pick(([2, 3], [3, 2]), ([6, 4], [4, 6]), ([2, 2, 3], [4, 3]))
        head, tail = list(d.shape(0, 1)), list(d.shape(0, 1))
        return call(op, T((*head, *a, *tail)), [*head, *b, *tail])

    return make


def _permute(d: Draw) -> Example:
    shape = d.shape(0, 4)
    order = [i - len(shape) if d.flag() else i for i in d.order(len(shape))]
    return call("permute", T(shape), order)


def _transpose(d: Draw) -> Example:
    shape = d.shape(0, 4)
    return call("transpose.int", T(shape), d.dim(len(shape)), d.dim(len(shape)))


def _unsqueeze(d: Draw) -> Example:
    shape = d.shape(0, 3)
    return call("unsqueeze", T(shape), d.dim(len(shape) + 1))


def _squeeze(d: Draw) -> Example:
    shape = tuple(d.pick(1, n) for n in d.shape(0, 4))
    some = d.dims(len(shape), 0)
    return d.pick(
        call("squeeze", T(shape)),
        call("squeeze.dim", T(shape), d.dim(len(shape))),
        call("squeeze.dims", T(shape), some),
    )


def _expand(d: Draw) -> Example:
    target = list(d.shape(0, 4))
    source = d.broadcast(tuple(target))
    skip = len(target) - len(source)
    kept = [-1 if i >= skip and source[i - skip] == n and d.flag() else n
            for i, n in enumerate(target)]  # fmt: skip
    return call("expand", T(source), kept)


def _bounds(d: Draw, n: int) -> tuple[int | None, int | None]:
    start, end = d.size(-n - 1, n + 1), d.size(-n - 1, n + 1)
    return d.pick(None, start, start), d.pick(None, 2**63 - 1, end, end)


def _slice(d: Draw) -> Example:
    shape = tuple(n + 2 for n in d.shape(1, 3))
    dim = d.dim(len(shape))
    return call("slice.Tensor", T(shape), dim, *_bounds(d, shape[dim]), d.pick(1, 1, 1, 2))


def _strided(d: Draw) -> Example:
    n, step = d.size(1, 3), d.size(2, 3)
    start = d.size(0, step - 1)
    return call("slice.Tensor", T((n * step, 3)), 0, start, d.pick(None, n * step), step)


def _select(d: Draw) -> Example:
    shape = tuple(n + 1 for n in d.shape(1, 3))
    dim = d.dim(len(shape))
    return call("select.int", T(shape), dim, d.dim(shape[dim]))


def _select_scatter(d: Draw) -> Example:
    shape = tuple(n + 1 for n in d.shape(1, 3))
    dim = d.dim(len(shape)) % len(shape)
    value = T(shape[:dim] + shape[dim + 1 :])
    return call("select_scatter", T(shape), value, dim, d.dim(shape[dim]))


def _slice_scatter(d: Draw) -> Example:
    shape = list(n + 2 for n in d.shape(1, 3))
    dim = d.dim(len(shape))
    start = d.size(0, shape[dim] - 1)
    end = d.size(start + 1, shape[dim])
    value = list(shape)
    value[dim] = end - start
    start = start - shape[dim] if d.flag() else start
    return call("slice_scatter", T(tuple(shape)), T(tuple(value)), dim, start, end)


def _strided_scatter(d: Draw) -> Example:
    """Every so manieth, or nothing."""
    n, step, dim = d.size(2, 6), d.size(2, 3), d.size(0, 1)
    start, end = d.size(0, n), d.pick(0, n, n + 2)
    value = [3, 3]
    value[dim] = len(range(start, min(end, n), step))
    shape = [3, 3]
    shape[dim] = n
    return call("slice_scatter", T(tuple(shape)), T(tuple(value)), dim, start, end, step)


def _split(d: Draw) -> Example:
    shape = tuple(n + 1 for n in d.shape(1, 3))
    dim = d.dim(len(shape))
    if d.flag():
        return call("split.Tensor", T(shape), d.size(1, shape[dim]), dim)
    return call("split.sizes", T(shape), d.cut(shape[dim]), dim)


def _split_with_sizes(d: Draw) -> Example:
    shape = tuple(n + 1 for n in d.shape(1, 3))
    dim = d.dim(len(shape))
    sizes = d.cut(shape[dim])
    if d.flag():
        return call("split_with_sizes", T(shape), sizes, dim)
    nothing = [*shape]
    nothing[dim] = 0
    return call("split_with_sizes", T(tuple(nothing)), [0, 0], dim)


def _cat(d: Draw) -> Example:
    shape = d.shape(1, 3)
    dim = d.dim(len(shape))
    parts = [T((0,))] if d.size(0, 3) == 0 else []
    for n in [d.size(), *(d.size(0, 4) for _ in range(d.size(0, 2)))]:
        part = list(shape)
        part[dim] = n
        parts.append(T(tuple(part)))
    return call("cat", parts, dim)


def _stack(d: Draw) -> Example:
    shape = d.shape(0, 2)
    return call("stack", [T(shape)] * d.size(1, 3), d.dim(len(shape) + 1))


def _unbind(d: Draw) -> Example:
    shape = d.shape(1, 3)
    return call("unbind.int", T(shape), d.dim(len(shape)))


def _unbind_copy(d: Draw) -> Example:
    shape = d.shape(1, 4)
    return call("unbind_copy.int", T(shape), d.dim(len(shape)))


def _unfold(d: Draw) -> Example:
    shape = d.shape(1, 3)
    dim = d.dim(len(shape))
    return call("unfold", T(shape), dim, d.size(1, shape[dim]), d.size(1, 2))


def _repeat(d: Draw) -> Example:
    shape = d.shape(0, 2)
    times = [d.size(0, 3) if d.size(0, 4) == 0 else d.size(1, 3) for _ in shape]
    return call("repeat", T(shape), [*d.shape(0, 1), *times])


def _flip(d: Draw) -> Example:
    shape = d.shape(0, 3)
    return call("flip", T(shape), d.dims(len(shape), 0))


def _roll(d: Draw) -> Example:
    shape = d.shape(0, 3)
    dims = d.dims(len(shape), 1) if shape and prod(shape) > 1 else []
    if not dims or d.flag():
        return call("roll", T(shape), [1])
    return call("roll", T(shape), [d.size(-2, 2) for _ in dims], dims)


def _pad(d: Draw) -> Example:
    shape = tuple(n + 2 for n in d.shape(1, 3))
    pad = [d.pick(0, d.size(-1, 2)) for _ in range(2 * d.size(0, len(shape)))]
    return call("constant_pad_nd", T(shape), pad, d.pick(0, 0, 1.5))


def _triangle(op: str) -> Maker:
    return lambda d: call(op, T((*d.shape(0, 2), d.size(), d.size())), d.size(-1, 1))


EXAMPLES: Makers = {
    "_unsafe_view": [_view("_unsafe_view")],
    "cat": [_cat, _cat],
    "constant_pad_nd": [_pad],
    "expand": [_expand],
    "flip": [_flip],
    "permute": [_permute],
    "repeat": [_repeat],
    "reshape": [_view("reshape"), _view_across("reshape")],
    "roll": [_roll],
    "select": [_select],
    "select_scatter": [_select_scatter],
    "slice": [_slice, _slice, _strided],
    "slice_scatter": [_slice_scatter, _strided_scatter],
    "split": [_split],
    "split_with_sizes": [_split_with_sizes],
    "squeeze": [_squeeze],
    "stack": [_stack],
    "t": [lambda d: call("t", T(d.shape(0, 2)))],
    "transpose": [_transpose],
    "tril": [_triangle("tril")],
    "triu": [_triangle("triu")],
    "unbind": [_unbind],
    "unbind_copy": [_unbind_copy],
    "unfold": [_unfold],
    "unsqueeze": [_unsqueeze],
    "view": [_view("view"), _view_across("view")],
}
NO_RULE: list[Example] = [
    call("view", T((0, 3)), [3, 0]),
]
