"""Ops that work element by element, with broadcasting; the only question is where they are linear."""

from __future__ import annotations

from .call import OpCall, Table

# Linear in each operand alone: a pending sum flows through one, the others multiply.
MULTIPLY = "mul"
# Linear in the first operand only.
SCALE = "neg div clone alias detach detach_ lift_fresh_copy contiguous real imag view_as_real"
# Linear in all tensor operands at once.
ADD = "add sub rsub"
NONLINEAR = """
abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max
clamp_min celu copysign cos cosh digamma dropout elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmod
full_like ge gelu glu_jvp gt hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lgamma log log10
log1p log2 log_sigmoid_forward logaddexp logical_and logical_not logical_or logical_xor logit lt maximum minimum
mish nan_to_num ne nextafter ones_like polar pow reciprocal relu relu6 remainder round rsqrt selu sigmoid sign
signbit silu sin sinc sinh softplus softshrink sqrt square sub_scalar tan tanh threshold trunc xlogy zeros_like
empty_like rand_like randn_like prelu
"""


def _pointwise(call: OpCall, linear: str = "") -> str:
    text = ", ".join(["..."] * len(call.operands)) + " -> ..."
    return f"{text} | linear {linear}" if linear else text


def _add(call: OpCall) -> str:
    # x + 1 is not linear: each rank would add the 1.
    both = len(call.operands) == 2 and call.operands[0] != () and call.operands[1] != ()
    return _pointwise(call, "0+1" if both and call.result_dtypes[0].is_floating_point else "")


def _multiply(call: OpCall) -> str:
    return _pointwise(call, " ".join(map(str, range(len(call.operands)))))


def _scale(call: OpCall) -> str:
    return _pointwise(call, "0")


def _divide(call: OpCall) -> str:
    return _pointwise(call, "" if call.arguments.get("rounding_mode") else "0")


def _cast(call: OpCall) -> str:
    floating = call.result_dtypes[0].is_floating_point and call.operand_dtypes[0].is_floating_point
    return _pointwise(call, "0" if floating else "")


def _where(call: OpCall) -> str:
    return _pointwise(call, "1+2" if len(call.operands) == 3 else "")


def _masked_fill(call: OpCall) -> str:
    return _pointwise(call, "0" if call.arguments.get("value") == 0 else "")


TABLE: Table = {
    **dict.fromkeys(NONLINEAR.split(), _pointwise),
    **dict.fromkeys(SCALE.split(), _scale),
    **dict.fromkeys(ADD.split(), _add),
    MULTIPLY: _multiply,
    "div": _divide,
    "_to_copy": _cast,
    "to": _cast,
    "where": _where,
    "masked_fill": _masked_fill,
}
