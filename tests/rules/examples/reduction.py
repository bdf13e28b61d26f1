"""Calls of ops that reduce or scan."""

from ..draw import Draw, Example, Maker, Makers, T, call


def _over(op: str, kind: str = "normal", low: int = 0) -> Maker:
    """Over a list of dims, maybe none or all of them, with or without keepdim."""

    def make(d: Draw) -> Example:
        shape = d.shape(0, 3)
        dims = d.pick(d.dims(len(shape), low), d.dims(len(shape), low), None if not low else [0])
        return call(op, T(shape, kind), dims, d.flag())

    return make


def _over_one(op: str, kind: str = "normal", **kwargs: object) -> Maker:
    def make(d: Draw) -> Example:
        shape = d.shape(0, 3)
        return call(op, T(shape, kind), d.dim(len(shape)), d.flag(), **kwargs)

    return make


def _over_all(op: str, kind: str = "normal") -> Maker:
    return lambda d: call(op, T(d.shape(0, 3), kind))


def _variance(op: str) -> Maker:
    def make(d: Draw) -> Example:
        shape = d.shape(1, 3)
        dims = d.pick(d.dims(len(shape)), None)
        return call(op, T(shape), dims, correction=0, keepdim=d.flag())

    return make


def _scan(op: str, *rest: object, kind: str = "normal", **kwargs: object) -> Maker:
    def make(d: Draw) -> Example:
        shape = d.shape(0, 3)
        return call(op, T(shape, kind), d.dim(len(shape)), *rest, **kwargs)

    return make


def _norm(d: Draw) -> Example:
    shape = d.shape(0, 3)
    dims = d.pick(d.dims(len(shape), 0), None)
    return call("linalg_vector_norm", T(shape), d.pick(1.0, 2.0, 3.0), dims, d.flag())


def _topk(d: Draw) -> Example:
    shape = d.shape(0, 3)
    dim = d.dim(len(shape))
    k = d.size(1, shape[dim]) if shape else 1
    return call("topk", T(shape), k, dim, d.flag(), True)


def _stable_sort(d: Draw) -> Example:
    shape = d.shape(0, 3)
    return call("sort.stable", T(shape), stable=True, dim=d.dim(len(shape)), descending=d.flag())


def _bincount(d: Draw) -> Example:
    n = d.size(3, 8)
    return call("bincount", T((n,), "integers", 5), d.pick(None, T((n,))), 6)


def _histc(d: Draw) -> Example:
    low, high = d.pick((0, 0), (-3, 3))
    return call("histc", T((*d.shape(0, 1), 6)), d.size(2, 4), low, high)


def _fourier(d: Draw) -> Example:
    shape = d.shape(1, 3)
    some = d.order(len(shape))[: d.size(1, len(shape))]  # counted from the front, unlike elsewhere
    return call("_fft_c2c", T(shape, "complex"), some, d.size(0, 2), d.flag())


def _pool(op: str, depth: int) -> Maker:
    """Windows of every size that fits; some are single elements."""

    def make(d: Draw) -> Example:
        windows = [d.size(1, 3) for _ in range(depth)]
        padding = [d.size(0, w // 2) for w in windows]
        steps = d.pick([], windows, [d.size(1, 2)], [d.size(1, 2) for _ in windows])
        shape = (*d.shape(1, 2)[-2:], *(w + d.size(0, 3) for w in windows))
        if op == "avg_pool":
            return call(
                f"{op}{depth}d", T(shape), windows, steps, padding, d.flag(), d.flag(),
                d.pick(None, 3),
            )  # fmt: skip
        return call(f"{op}{depth}d_with_indices", T(shape), windows, steps, padding,
                    [1] * depth, d.flag())  # fmt: skip

    return make


def _resized_pool(op: str) -> Maker:
    def make(d: Draw) -> Example:
        depth = int(op[-2])
        head = d.shape(2, 2) if "fractional" in op else d.shape(1, 2)[-2:]
        out = [d.size(1, 3) for _ in range(depth)]
        space = [n + d.size(2, 4) for n in out]
        if "fractional" in op:
            samples = T((*head, depth), "positive")
            return call(op, T((*head, *space)), [2] * depth, out, samples)
        return call(op, T((*head, *space)), out)

    return make


def _distances(d: Draw) -> Example:
    return call("_pdist_forward", T((d.size(2, 5), d.size())), d.pick(1.0, 2.0, 3.0))


def _extreme(op: str) -> list[Maker]:
    def other(d: Draw) -> Example:
        shape = d.shape(0, 3)
        return call(f"{op}.other", T(shape), T(d.broadcast(shape)))

    return [_over_all(op), _over_one(f"{op}.dim"), other]


RESIZED = """
_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d
fractional_max_pool2d fractional_max_pool3d
""".split()

EXAMPLES: Makers = {
    **{op: [_resized_pool(op)] for op in RESIZED},
    "_fft_c2c": [_fourier],
    "_log_softmax": [_scan("_log_softmax", False)],
    "_pdist_forward": [_distances],
    "_safe_softmax": [_scan("_safe_softmax")],
    "_softmax": [_scan("_softmax", False)],
    "all": [
        _over_all("all", "bool"),
        _over_one("all.dim", "bool"),
        _over("all.dims", "bool"),
    ],
    "amax": [_over("amax", low=1), lambda d: call("amax", T(d.shape(0, 3)), [])],
    "amin": [_over("amin", low=1)],
    "any": [
        _over_all("any", "bool"),
        _over_one("any.dim", "bool"),
        _over("any.dims", "bool"),
    ],
    "argmax": [_over_one("argmax"), _over_all("argmax")],
    "argmin": [_over_one("argmin"), _over_all("argmin")],
    "avg_pool2d": [_pool("avg_pool", 2)],
    "avg_pool3d": [_pool("avg_pool", 3)],
    "bincount": [_bincount],
    "cummax": [_scan("cummax")],
    "cummin": [_scan("cummin")],
    "cumprod": [_scan("cumprod")],
    "cumsum": [_scan("cumsum")],
    "histc": [_histc],
    "linalg_vector_norm": [_norm],
    "log_softmax": [_scan("log_softmax.int")],
    "logcumsumexp": [_scan("logcumsumexp")],
    "logsumexp": [_over("logsumexp", low=1)],
    "max": _extreme("max"),
    "max_pool2d_with_indices": [_pool("max_pool", 2)],
    "max_pool3d_with_indices": [_pool("max_pool", 3)],
    "mean": [_over_all("mean"), _over("mean.dim")],
    "median": [_over_all("median"), _over_one("median.dim")],
    "min": _extreme("min"),
    "prod": [_over_all("prod"), _over_one("prod.dim_int")],
    "softmax": [_scan("softmax.int")],
    "sort": [_scan("sort"), _stable_sort],
    "std": [_variance("std.correction")],
    "sum": [_over_all("sum"), _over("sum.dim_IntList"), _over("sum.dim_IntList", "bool")],
    "topk": [_topk],
    "var": [_variance("var.correction")],
    "var_mean": [_variance("var_mean.correction")],
}
NO_RULE: list[Example] = []
