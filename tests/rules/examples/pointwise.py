"""Calls of ops that work element by element."""

from collections.abc import Sequence

import torch

from ..draw import Draw, Example, Maker, Makers, T, call

UNARY = {
    "above": "acosh",
    "complex": "angle conj_physical imag real view_as_real",
    "integers": "bitwise_not",
    "normal": """
        abs alias asinh atan ceil celu clone contiguous cos cosh detach detach_ elu empty_like erf
        erfc exp exp2 expm1 exponential floor gelu hardsigmoid hardswish hardtanh isfinite isinf
        isnan leaky_relu lift_fresh_copy log_sigmoid_forward logical_not mish nan_to_num neg
        ones_like rand_like randn_like reciprocal relu relu6 round selu sgn sigmoid sign signbit
        silu sin sinc sinh softplus softshrink square tan tanh trunc uniform zeros_like
    """,
    "positive": """
        acos asin atanh digamma erfinv lgamma log log10 log1p log2 logit rsqrt sqrt
    """,
}
BINARY = {
    "integers": """
        bitwise_and.Tensor bitwise_left_shift.Tensor bitwise_or.Tensor bitwise_right_shift.Tensor
        bitwise_xor.Tensor
    """,
    "normal": """
        atan2 copysign.Tensor floor_divide fmax fmin fmod.Tensor ge.Tensor gt.Tensor hypot le.Tensor
        logaddexp logaddexp2 lt.Tensor maximum minimum nextafter remainder.Tensor
    """,
    "steps": "eq.Tensor logical_and logical_or logical_xor ne.Tensor",
}
SCALAR = "copysign eq floor_divide fmod ge gt le lt ne remainder"


def _unary(op: str, kind: str) -> Maker:
    return lambda d: call(op, T(d.shape(0, 3), kind, 9))


def _pair(d: Draw, first: str, second: str, high: int = 3) -> tuple[T, T]:
    """Two tensors, of which either may be broadcast; one may be a scalar."""
    shape = d.shape(0, 3)
    shapes = [shape, d.pick(shape, d.broadcast(shape), ())]
    if d.flag():
        shapes.reverse()
    return T(shapes[0], first, high), T(shapes[1], second, high)


def _binary(op: str, first: str = "normal", second: str | None = None) -> Maker:
    return lambda d: call(op, *_pair(d, first, second or first))


def _scalar(op: str, *rest: object, kind: str = "normal", **kwargs: object) -> Maker:
    return lambda d: call(op, T(d.shape(0, 3), kind), *rest, **kwargs)


def _gated(d: Draw) -> Example:
    shape = list(d.shape(1, 3))
    dim = d.dim(len(shape))
    shape[dim] *= 2
    return call("glu", T(tuple(shape)), dim)


def _alpha(op: str) -> Maker:
    return lambda d: call(op, *_pair(d, "normal", "normal"), alpha=d.pick(1, 2.5))


def _square(d: Draw) -> Example:
    """The same tensor twice is two operands."""
    x = T(d.shape(0, 3))
    return call("mul.Tensor", x, x)


def _mixed(d: Draw) -> Example:
    return call("mul.Tensor", *_pair(d, "normal", d.pick("bool", "integers", "complex")))


def _three(op: str, kinds: Sequence[str], **kwargs: object) -> Maker:
    def make(d: Draw) -> Example:
        shape = d.shape(0, 3)
        shapes = [shape, d.broadcast(shape), d.pick(shape, ())]
        order = d.order(3)
        return call(op, *(T(shapes[i], k) for i, k in zip(order, kinds, strict=True)), **kwargs)

    return make


def _where_other(d: Draw) -> Example:
    return call("where.ScalarOther", *_pair(d, "bool", "normal"), d.pick(0, 1.5))


def _where_self(d: Draw) -> Example:
    condition, x = _pair(d, "bool", "normal")
    return call("where.ScalarSelf", condition, d.pick(0, 1.5), x)


def _masked_fill(d: Draw) -> Example:
    shape = d.shape(0, 3)
    x, mask = T(shape), T(d.broadcast(shape), "bool")
    if d.flag():
        return call("masked_fill.Tensor", x, mask, T(()))
    return call("masked_fill.Scalar", x, mask, d.pick(0, 1.5, float("-inf")))


def _clamp(d: Draw) -> Example:
    shape = d.shape(0, 3)
    low, high = T(d.broadcast(shape)), d.pick(None, T(shape))
    return call("clamp.Tensor", T(shape), low, high)


def _cast(d: Draw) -> Example:
    kind = d.pick("normal", "normal", "bool", "integers")
    return call("_to_copy", T(d.shape(0, 3), kind, 5), dtype=d.pick(torch.float64, torch.float32))


def _to_integer(d: Draw) -> Example:
    return call("to.dtype", T(d.shape(0, 3)), d.pick(torch.long, torch.float32))


def _to_other(d: Draw) -> Example:
    return call("to.other", T(d.shape(0, 3)), T(d.shape(0, 2), "normal", 1, torch.float32))


def _prelu(d: Draw) -> Example:
    shape = d.shape(1, 4)
    channels = shape[1] if len(shape) > 1 else 1
    return call("prelu", T(shape), T(d.pick((), (1,), (channels,)), "positive"))


def _prelu_kernel(d: Draw) -> Example:
    n, c, s = d.size(), d.size(), d.size()
    return call("_prelu_kernel", T((n, c, s)), T((1, c, 1), "positive"))


def _noisy(d: Draw) -> Example:
    shape = d.shape(0, 3)
    return call("rrelu_with_noise_functional", T(shape), T(shape), 0.1, 0.3, False)


def _copy(d: Draw) -> Example:
    shape = d.shape(0, 3)
    return call("copy", T(shape), T(d.broadcast(shape)))


def _as_complex(d: Draw) -> Example:
    return call("view_as_complex", T((*d.shape(0, 2), 2)))


def _op(overload: str) -> str:
    return overload.partition(".")[0]


EXAMPLES: Makers = {
    **{op: [_unary(op, kind)] for kind, ops in UNARY.items() for op in ops.split()},
    **{_op(o): [_binary(o, kind)] for kind, ops in BINARY.items() for o in ops.split()},
    "_prelu_kernel": [_prelu_kernel],
    "_to_copy": [_cast, _cast],
    "add": [_alpha("add.Tensor"), _alpha("add.Tensor"), _scalar("add.Tensor", 1)],
    "addcdiv": [_three("addcdiv", ["normal", "normal", "positive"], value=2)],
    "addcmul": [_three("addcmul", ["normal", "normal", "normal"], value=0.5)],
    "clamp": [_clamp, _scalar("clamp", -1, 2), _scalar("clamp", None, 2)],
    "clamp_max": [_scalar("clamp_max", 1), _binary("clamp_max.Tensor")],
    "clamp_min": [_scalar("clamp_min", 1), _binary("clamp_min.Tensor")],
    "complex": [_binary("complex")],
    "copy": [_copy],
    "div": [
        _binary("div.Tensor", "normal", "positive"),
        _binary("div.Tensor", "integers", "positive"),
        _scalar("div.Tensor", 3),
        _scalar("div.Tensor_mode", 2, rounding_mode="floor"),
        lambda d: call("div.Tensor_mode", *_pair(d, "normal", "positive"), rounding_mode=None),
    ],
    "dropout": [_scalar("dropout", 0.5, False)],
    "full_like": [_scalar("full_like", 2.5), _scalar("full_like", 0)],
    "glu": [_gated],
    "lerp": [
        _three("lerp.Tensor", ["normal", "normal", "positive"]),
        lambda d: call("lerp.Scalar", *_pair(d, "normal", "normal"), 0.3),
    ],
    "masked_fill": [_masked_fill, _masked_fill],
    "mul": [
        _binary("mul.Tensor"),
        _binary("mul.Tensor"),
        _scalar("mul.Tensor", 2.5),
        _square,
        _mixed,
    ],
    "bernoulli": [_scalar("bernoulli.p", 0.5)],
    "native_dropout": [_scalar("native_dropout", 0.5, False)],
    "polar": [_binary("polar", "positive", "normal")],
    "pow": [
        _scalar("pow.Tensor_Scalar", 2),
        lambda d: call("pow.Scalar", 2.0, T(d.shape(0, 3))),
        _binary("pow.Tensor_Tensor", "positive", "normal"),
        _binary("pow.Tensor_Tensor", "normal", "integers"),
    ],
    "prelu": [_prelu],
    "rrelu_with_noise_functional": [_noisy],
    "rsub": [_alpha("rsub.Tensor"), _scalar("rsub.Scalar", 1)],
    "sub": [_alpha("sub.Tensor"), _alpha("sub.Tensor"), _scalar("sub.Tensor", 1)],
    "threshold": [_scalar("threshold", 0.5, 2.0)],
    "to": [_to_integer, _to_other],
    "view_as_complex": [_as_complex],
    "where": [
        _three("where.self", ["bool", "normal", "normal"]),
        _three("where.self", ["bool", "normal", "integers"]),
        _where_other,
        _where_self,
        _scalar("where.Scalar", 0, 1.5, kind="bool"),
    ],
    "xlogy": [
        _binary("xlogy.Tensor", "normal", "positive"),
        _scalar("xlogy.Scalar_Other", 2.5),
        lambda d: call("xlogy.Scalar_Self", 2.5, T(d.shape(0, 3), "positive")),
    ],
}
for _name in SCALAR.split():
    _overload = f"{_name}.Scalar"
    EXAMPLES[_name] = [*EXAMPLES[_name], _scalar(_overload, 2, kind="normal")]
NO_RULE: list[Example] = []
