"""Rules of element-wise ops with broadcasting, and the operands in which they are linear."""

from __future__ import annotations

from .call import OpCall, Operand, Table, axis_names, clause

NONLINEAR = """
_prelu_kernel abs acos acosh angle asin asinh atan atan2 atanh bernoulli bitwise_and
bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max
clamp_min copysign cos cosh digamma elu eq erf erfc erfinv exp exp2 expm1 exponential
floor floor_divide fmax fmin fmod ge gelu gt hardsigmoid hardswish hardtanh hypot isfinite isinf
isnan le leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward logaddexp logaddexp2 logical_and
logical_not logical_or logical_xor logit lt maximum minimum mish nan_to_num native_dropout ne
nextafter ones_like pow rand_like randn_like reciprocal relu relu6 remainder round
rrelu_with_noise_functional rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus
softshrink sqrt square tan tanh threshold trunc uniform
"""
ONE_OPERAND = """
alias clone conj_physical contiguous detach detach_ imag lift_fresh_copy neg real xlogy
"""
"""Linear in the first operand only."""


def _pointwise(call: OpCall, linear: str = "") -> str:
    dots = [", ".join(["..."] * n) for n in (len(call.operands), len(call.results))]
    return f"{dots[0]} -> {dots[1]}" + clause("linear", linear.split())


def _like(call: OpCall) -> str:
    """A tensor of one value or uninitialised, with the shape of another."""
    zero = call.op in ("empty_like", "zeros_like") or call.arguments["fill_value"] == 0
    return _pointwise(call, "zero" if zero and call.result_dtypes[0].is_floating_point else "")


def _first(call: OpCall) -> str:
    return _pointwise(call, "0" if call.arguments["self"] == Operand(0) else "")


def _add(call: OpCall) -> str:
    # x + 1 is not linear: each rank would add the 1. Integers are never Partial.
    real = call.result_dtypes[0].is_floating_point
    return _pointwise(call, "0+1" if len(call.operands) == 2 and real else "")


def _multiply(call: OpCall) -> str:
    return _pointwise(call, " ".join(map(str, range(len(call.operands)))))


def _divide(call: OpCall) -> str:
    return _pointwise(call, "" if call.arguments.get("rounding_mode") else "0")


def _cast(call: OpCall) -> str:
    if len(call.operands) == 2:  # to.other: the second operand gives only dtype and device
        mine = [f"s{i}" for i in range(len(call.operands[1]))]
        linear = " | linear 0 0+1" if call.floats() else ""
        return f"..., {' '.join(mine)} -> ...{linear}" + clause("free", mine)
    return _pointwise(call, "0" if call.floats() else "")


def _where(call: OpCall) -> str:
    """Linear in the two values; if one of them is a number, it must be zero."""
    if len(call.operands) == 3:
        return _pointwise(call, "1+2")
    number = call.arguments["other"] if call.present("self") else call.arguments["self"]
    return _pointwise(call, "1" if len(call.operands) == 2 and number == 0 else "")


def _masked_fill(call: OpCall) -> str:
    value = call.arguments["value"]
    if isinstance(value, Operand):
        return _pointwise(call, "0+2")
    return _pointwise(call, "0" if value == 0 else "")


def _copy(call: OpCall) -> str:
    """The second operand in the shape of the first. The first operand's values do not matter."""
    return _pointwise(call, "1 0+1")


def _dropout(call: OpCall) -> str:
    return _pointwise(call, "" if call.arguments["train"] else "0")


def _prelu(call: OpCall) -> str:
    """One slope, or one slope per channel; channels are the second dim."""
    names, slopes = axis_names(len(call.operands[0])), call.operands[1]
    slope = "" if slopes == () else "1" if slopes == (1,) else names[1] if len(names) > 1 else ""
    return f"{' '.join(names)}, {slope} -> {' '.join(names)}"


def _gated(call: OpCall) -> str:
    """The first half of a dim times a function of the second half."""
    names, dim = axis_names(len(call.operands[0])), call.dim()
    out = " ".join(names)
    names[dim] = f"({names[dim]} + {names[dim]})"
    return f"{' '.join(names)} -> {out}"


TABLE: Table = {
    **dict.fromkeys(NONLINEAR.split(), _pointwise),
    **dict.fromkeys(ONE_OPERAND.split(), _first),
    **dict.fromkeys("add rsub sub".split(), _add),
    **dict.fromkeys("_to_copy to".split(), _cast),
    **dict.fromkeys("empty_like full_like zeros_like".split(), _like),
    "addcdiv": "..., ..., ... -> ... | linear 0+1",
    "addcmul": "..., ..., ... -> ... | linear 0+1 0+2",
    "complex": "..., ... -> ... | linear 0+1",
    "copy": _copy,
    "div": _divide,
    "dropout": _dropout,
    "glu": _gated,
    "lerp": lambda call: _pointwise(call, "0+1"),
    "masked_fill": _masked_fill,
    "mul": _multiply,
    "polar": "..., ... -> ... | linear 0",
    "prelu": _prelu,
    "view_as_complex": "... c -> ... | whole c | linear 0",
    "view_as_real": "... -> ... c | whole c | linear 0",
    "where": _where,
}
