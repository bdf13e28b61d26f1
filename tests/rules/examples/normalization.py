"""Calls of norms and losses."""

from ..draw import Draw, Example, Maker, Makers, T, call


def _norm(op: str, *, biased: bool) -> Maker:
    def make(d: Draw) -> Example:
        shape = d.shape(1, 3)
        tail = shape[-d.size(1, len(shape)) :]
        weight, bias = (T(tail) if d.flag() else None for _ in range(2))
        if not biased:
            return call(op, T(shape), list(tail), weight, 1e-3)
        return call(op, T(shape), list(tail), weight, bias, 1e-3)

    return make


def _group_norm(d: Draw) -> Example:
    n, g, c, space = d.size(), d.size(), d.size(), d.shape(0, 2)
    # torch fails in the backward of a bias without a weight.
    weight, bias = (T((g * c,)),) * 2 if d.flag() else (None, None)
    # Two elements at least, or all norms are zero.
    return call("group_norm", T((n, g * c, *space, 2)), g, weight, bias, 1e-3)


def _native_group_norm(d: Draw) -> Example:
    n, g, c, s = d.size(), d.size(), d.size(), d.size(2, 4)
    weight, bias = (T((g * c,)),) * 2 if d.flag() else (None, None)
    return call("native_group_norm", T((n, g * c, s)), weight, bias, n, g * c, s, g, 1e-3)


def _batch_norm(d: Draw) -> Example:
    n, c, space = d.size(), d.size(), d.shape(0, 2)
    weight, bias = (T((c,)) if d.flag() else None for _ in range(2))
    mean, var = T((c,)), T((c,), "positive")
    op = "_native_batch_norm_legit_no_training"
    return call(op, T((n, c, *space)), weight, bias, mean, var, 0.1, 1e-3)


def _own_batch_norm(d: Draw) -> Example:
    n, c, space = d.size(2, 4), d.size(), d.shape(0, 2)
    weight, bias = (T((c,)) if d.flag() else None for _ in range(2))
    op = "_native_batch_norm_legit.no_stats"
    return call(op, T((n, c, *space)), weight, bias, True, 0.1, 1e-3)


def _updating_batch_norm(d: Draw) -> Example:
    n, c, space = d.size(2, 4), d.size(), d.shape(0, 2)
    weight, bias = (T((c,)) if d.flag() else None for _ in range(2))
    mean, var = T((c,)), T((c,), "positive")
    op = "_native_batch_norm_legit_functional"
    return call(op, T((n, c, *space)), weight, bias, mean, var, True, 0.1, 1e-3)


def _ctc_loss(d: Draw) -> Example:
    t, n, c, s = d.size(5, 7), d.size(), d.size(2, 5), d.size(1, 2)
    targets, long, short = T((n, s), "integers", c), T((n,), "all", t), T((n,), "all", s)
    return call("_ctc_loss.Tensor", T((t, n, c)), targets, long, short, 0, d.flag())


def _cross_entropy(d: Draw) -> Example:
    n, v = d.size(2, 6), d.size(2, 6)
    reduction, ignored = d.pick(0, 1, 2), d.pick(-100, 0)
    target = T((n,), "integers", v)
    return call("cross_entropy_loss", T((n, v)), target, None, reduction, ignored, d.pick(0.0, 0.1))


EXAMPLES: Makers = {
    "_ctc_loss": [_ctc_loss],
    "_native_batch_norm_legit": [_own_batch_norm],
    "_native_batch_norm_legit_functional": [_updating_batch_norm],
    "_native_batch_norm_legit_no_training": [_batch_norm],
    "cross_entropy_loss": [_cross_entropy],
    "group_norm": [_group_norm],
    "layer_norm": [_norm("layer_norm", biased=True)],
    "native_group_norm": [_native_group_norm],
    "native_layer_norm": [_norm("native_layer_norm", biased=True)],
    "rms_norm": [_norm("rms_norm", biased=False)],
}
NO_RULE: list[Example] = [
    call("cross_entropy_loss", T((3, 4)), T((3, 4), "positive")),
    call("cross_entropy_loss", T((3, 4, 2)), T((3, 2), "integers", 4)),
    call("cross_entropy_loss", T((3, 4)), T((3,), "integers", 4), T((4,), "positive")),
]
