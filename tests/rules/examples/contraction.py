"""Calls of ops that contract."""

import torch

import shardwright.planner.trace.record.attention_rows  # noqa: F401 (it defines the op)

from ..draw import Draw, Example, Makers, T, call


def _linear(d: Draw) -> Example:
    lead, i, o = d.shape(0, 2), d.size(), d.size()
    return call("linear", T((*lead, i)), T((o, i)), T((o,)) if d.flag() else None)


def _linear_of_one(d: Draw) -> Example:
    return call("linear", T((*d.shape(0, 2), 4)), T((4,)))


def _addmm(d: Draw) -> Example:
    m, k, n = d.size(), d.size(), d.size()
    numbers = {"beta": 2.0, "alpha": 0.5} if d.flag() else {}
    return call("addmm", T(d.broadcast((m, n))), T((m, k)), T((k, n)), **numbers)


def _baddbmm(d: Draw) -> Example:
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    return call("baddbmm", T(d.broadcast((b, m, n))), T((b, m, k)), T((b, k, n)), beta=2, alpha=3)


def _bmm(d: Draw) -> Example:
    b, m, k, n = d.size(), d.size(), d.size(), d.size()
    return call("bmm", T((b, m, k)), T((b, k, n)))


def _attention(d: Draw) -> Example:
    b, h, q, e = d.size(), d.size(), d.size(2, 5), d.size(2, 4)
    causal = d.flag()
    k = q if causal else d.size(2, 5)
    lead = d.pick((b, h), (b, h), (h,), ())
    query, key = (*lead, q, e), (*lead, k, e)
    return call(
        "scaled_dot_product_attention", T(query), T(key), T(key), None, 0.0, causal, scale=0.5
    )


def _masked_attention(d: Draw) -> Example:
    b, h, q, k, e = d.size(), d.size(), d.size(2, 5), d.size(2, 5), d.size(2, 4)
    lead = d.pick((b, h), (b, h), (h,), ())
    mask = T((*d.broadcast(lead), *d.pick((q, k), (1, k))), d.pick("normal", "bool"))
    query, key = T((*lead, q, e)), T((*lead, k, e))
    return call("scaled_dot_product_attention", query, key, key, mask)


def _attention_rows(d: Draw) -> Example:
    b, h, q, k, e = d.size(), d.size(), d.size(2, 5), d.size(2, 5), d.size(2, 4)
    mask = T((*d.broadcast((b, h)), *d.pick((q, k), (1, k))), d.pick("normal", "bool"))
    key = T((b, h, k, e))
    return call("shardwright::attention_rows", T((b, h, q, e)), key, key, d.pick(None, mask))


def _grouped_attention(d: Draw) -> Example:
    b, h, g, q, e = d.size(1, 3), d.size(1, 3), d.size(1, 3), d.size(2, 5), d.size(2, 4)
    heads = d.pick(1, h * g)
    mask = d.pick(None, T((d.pick(1, b), heads, q, q)), T((heads, q, q)), T((q, q), "bool"))
    key = T((b, h, q, e))
    return call(
        "scaled_dot_product_attention", T((b, h * g, q, e)), key, key, mask, enable_gqa=True
    )


def _convolution(d: Draw) -> Example:
    space = d.pick(1, 1, 2)
    n, i, o, g, k = d.size(1, 3), d.size(1, 4), d.size(1, 4), d.pick(1, 1, 2, 3), d.size(1, 3)
    transposed = d.size(0, 3) == 0
    weight = (g * i, o) if transposed else (g * o, i)
    kernel = (k,) * space
    bias = T((g * o,)) if d.flag() else None
    ones, padding = [1] * space, [d.size(0, 1)] * space
    stride = [d.size(1, 2)] * space
    x = T((n, g * i, *d.shape(space, space)))
    x = T((*x.shape[:2], *(s + 3 for s in x.shape[2:])))
    return call(
        "convolution",
        x,
        T((*weight, *kernel)),
        bias,
        stride,
        padding,
        ones,
        transposed,
        [0] * space,
        g,
    )


def _depthwise(d: Draw) -> Example:
    c, m, k = d.size(2, 5), d.size(1, 2), d.size(1, 3)
    bias = T((c * m,)) if d.flag() else None
    weight = T((c * m, 1, k))
    return call("convolution", T((2, c, 6)), weight, bias, [1], [k - 1], [1], False, [0], c)


def _bilinear(d: Draw) -> Example:
    lead, i, j, o = d.shape(0, 2), d.size(), d.size(), d.size()
    bias = T((o,)) if d.flag() else None
    return call("bilinear", T((*lead, i)), T((*lead, j)), T((o, i, j)), bias)


def _conv_tbc(d: Draw) -> Example:
    t, n, i, o, k = d.size(3, 5), d.size(), d.size(), d.size(), d.size(1, 3)
    return call("conv_tbc", T((t, n, i)), T((k, i, o)), T((o,)), d.size(0, 1))


def _grouped_mm(d: Draw) -> Example:
    t, k, n, x = d.size(4, 8), 4 * d.size(1, 4), 4 * d.size(1, 4), d.size(1, 3)
    # There is no kernel for double.
    rows, matrices = (T(s, "normal", 1, torch.float32) for s in ((t, k), (x, k, n)))
    return call("_grouped_mm", rows, matrices, T((x,), "offsets", t))


def _grouped_mm_fallback(d: Draw) -> Example:
    t, k, n, x = d.size(4, 8), d.size(), d.size(), d.size(1, 3)
    return call("transformers::grouped_mm_fallback", T((t, k)), T((x, k, n)), T((x,), "offsets", t))


def _mm(d: Draw) -> Example:
    m, k, n = d.size(), d.size(), d.size()
    return call("mm", T((m, k)), T((k, n)))


def _mv(d: Draw) -> Example:
    m, k = d.size(), d.size()
    return call("mv", T((m, k)), T((k,)))


def _dot(d: Draw) -> Example:
    k = d.size()
    return call("dot", T((k,)), T((k,)))


EXAMPLES: Makers = {
    "_grouped_mm": [_grouped_mm],
    "addmm": [_addmm],
    "baddbmm": [_baddbmm],
    "bilinear": [_bilinear],
    "bmm": [_bmm],
    "conv_tbc": [_conv_tbc],
    "convolution": [_convolution, _convolution, _depthwise],
    "dot": [_dot],
    "transformers::grouped_mm_fallback": [_grouped_mm_fallback],
    "linear": [_linear, _linear, _linear_of_one],
    "mm": [_mm],
    "mv": [_mv],
    "shardwright::attention_rows": [_attention_rows],
    "scaled_dot_product_attention": [_attention, _masked_attention, _grouped_attention],
}
NO_RULE: list[Example] = []
