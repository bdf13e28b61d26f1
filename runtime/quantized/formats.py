"""The table of quantized formats: which tensors are stored of a weight, with which shapes.

A format lists its tensors, one a line: what it is and the usual bits of its elements, its key in
the checkpoint, and its dims. `{}` in a key is the weight's own name, such as `weight`; what stands
before the key is the weight's module; `../` before a key is the module around it. `a|b` is a key
that has several names.
Dims before those listed, such as experts, are the weight's own. A dim is written as

    out, in      the weight's rows (`out`) or columns (`in`)
    in/cols      one element for `cols` columns; `cols` is a number or a parameter
    in:bits      elements of `bits` bits, packed into stored numbers from the lowest bits on; if
                 `bits` does not divide a number, an element may lie in two
    in:bits@awq  the same, in the order ORDERS["awq"] within each number
    in:bits-less the same, after the parameter `less` was subtracted from each element, with carry
    in:bits+     the same, stored as two dims
    in>where     the element that the tensor `where` names for each column
    flat/64      rows and columns as one dim, row by row
    *            read in full; `*16` if it has 16 elements

A letter behind the bits says what the elements are (KINDS), and a `?` marks a tensor that may be
missing. A parameter that is None stands for
the length of the dim. Parameters that neither config nor `state` gives are found from the shapes.

Packages add formats by an entry point in the group `shardwright.quantization`, which leads to a
sequence of `Format`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import metadata
from typing import Any

from torch import Tensor

from shardwright.runtime.quantized import values

GROUP = "shardwright.quantization"
"""The group of entry points by which packages add formats."""

STATE = "state"
"""The tensor of a format that holds parameters, not numbers."""

Parameters = Mapping[str, Any]

ORDERS: Mapping[str, Sequence[int]] = {
    "low": range(32),
    "high": [1, 0],
    "awq": [0, 4, 1, 5, 2, 6, 3, 7],
}
"""Order -> for each element that is packed in one number, its place from the lowest bits."""


@dataclass(frozen=True)
class Dim:
    """A dim of a stored tensor; the fields are what the module's docstring says of it."""

    axis: str
    per: str | None = None
    bits: str | None = None
    order: str = "low"
    less: str | None = None
    through: str | None = None
    stored_as_two: bool = False

    @classmethod
    def read(cls, text: str) -> Dim:
        """Read a dim as the table writes it."""
        two, text = text.endswith("+"), text.removesuffix("+")
        axis, _, through = text.partition(">")
        axis, _, per = axis.partition("/")
        axis, _, bits = axis.partition(":")
        bits, _, less = bits.partition("-")
        bits, _, order = bits.partition("@")
        return cls(
            axis, per or None, bits or None, order or "low", less or None, through or None, two
        )


F8 = "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
FLOATS = "float64 float32 bfloat16 float16"
INTEGERS = "int64 int32 int16 int8 uint8"
KINDS = {
    "f": FLOATS,
    "s": f"{FLOATS} {F8} float8_e8m0fnu",
    "e": f"{FLOATS} {F8} float8_e8m0fnu uint8",
    "i": INTEGERS,
    "n": f"{FLOATS} {F8} int64 int32 int16 int8",
}
"""Letter -> what elements may be stored as: floats; also of 8 bits; also their exponents; integers;
any number that has a sign."""

EXPONENTS = tuple(KINDS["e"].split())


@dataclass(frozen=True)
class Part:
    """One stored tensor of a weight; `keys` are the names that it may have.

    `dtypes` are what its elements may be stored as; any if there are none.
    """

    role: str
    width: int
    keys: tuple[str, ...]
    dims: tuple[Dim, ...]
    optional: bool
    dtypes: tuple[str, ...] = ()

    @classmethod
    def read(cls, line: str) -> Part:
        """Read a line of the table."""
        what, key, *dims = line.split()
        role, _, width = what.rstrip("?").partition(":")
        kind = width.lstrip("0123456789")
        width, dtypes = width.removesuffix(kind), tuple(KINDS.get(kind, "").split())
        read = tuple(map(Dim.read, dims))
        keys = tuple(key.split("|"))
        return cls(role, int(width or 0), keys, read, what.endswith("?"), dtypes)


@dataclass(frozen=True)
class Format:
    """How a weight is stored.

    Attributes:
        name: what messages call it.
        method: the config's `quant_method`.
        text: its tensors, one a line; the first holds the weight's elements.
        value: computes the weight from its tensors, each spread to the weight's shape.
        dtypes: what the elements may be stored as, in safetensors' names.
        axes: the weight's own two last dims.
        unused: keys of tensors that hold nothing of the weight.
        state: reads parameters from the bytes of the tensor STATE.
        parameters: what is the same in all checkpoints.
    """

    name: str
    method: str
    text: str
    value: Callable[[Mapping[str, Tensor], Parameters], Tensor]
    dtypes: str
    axes: tuple[str, str] = ("out", "in")
    unused: str = ""
    state: Callable[[bytes], dict[str, Any]] | None = None
    parameters: Parameters = field(default_factory=dict)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Return the stored tensors; the first holds the weight's elements."""
        return tuple(Part.read(line) for line in self.text.strip().splitlines())


ACTIVATIONS = (
    "input_scale input_zero_point input_global_scale activation_scale output_scale k_scale v_scale "
    "../q_scale ../k_scale ../v_scale ../q_zero_point ../k_zero_point ../v_zero_point"
)
"""Tensors that hold nothing of a weight."""

SCALED = """
    codes:8     {}                   out in
    scale:32e   {}_scale_inv|{}_scale|scale|qscale_{}  out/rows in/cols
"""
FP4_BLOCKS = """
    codes:8     {}                   out in:4
    scale:32e   {}_scale_inv|scale   out/1 in/32
"""
FP8_ROWS = """
    codes:8     {}                   out in
    scale:32s   {}_scale             out/1 in/cols
"""
MXFP4 = """
    codes:8     {}_blocks            out in:4+
    scale:8e    {}_scales            out in/32
"""
COMPRESSED = """
    codes:8     {}                   out in
    scale:32e   {}_scale             out/rows in/cols
    zero:8n?    {}_zero_point        out/rows in/cols
"""
CT_PACKED = """
    codes:32    {}_packed            out in:bits
    scale:16f   {}_scale             out/rows in>groups
    zero:32i?   {}_zero_point        out:bits in>groups
    groups:32i? {}_g_idx             in
    state       {}_shape             *
"""
CT_ONE_SCALE = """
    codes:32    {}_packed            out in:bits
    scale:16f   {}_scale             out/rows in/cols
    zero:8n     {}_zero_point        out/rows in/cols
    state       {}_shape             *
"""
NVFP4 = """
    codes:8     {}_packed            out in:4
    scale:8s    {}_scale             out in/16
    whole:32f   {}_global_scale      *1
"""
MXFP4_PACKED = """
    codes:8     {}_packed            out in:4
    scale:8e    {}_scale             out in/32
"""
MXFP6_PACKED = """
    codes:8     {}_packed            out in:6
    scale:8e    {}_scale             out in/32
"""
MODELOPT_NVFP4 = """
    codes:8     {}                   out in:4
    scale:8s    {}_scale             out in/16
    factor:32f  {}_scale_2           *1
"""
GPTQ = """
    codes:32    q{}                  in:bits out
    zero:32i    qzeros               in>groups out:bits-less
    scale:16f   scales               in>groups out
    groups:32i? g_idx                in
"""
AWQ = """
    codes:32    q{}                  in out:bits@awq
    zero:32i?   qzeros               in>groups out:bits@awq
    scale:16f   scales               in>groups out
"""
BNB_4BIT = """
    codes:8     {}                   flat:4@high
    absmax:32f  {}.absmax            flat/block
    levels:32f  {}.quant_map         *16
    state       {}.quant_state.bitsandbytes__nf4|{}.quant_state.bitsandbytes__fp4  *
"""
NESTED = """
    codes:8     {}                   flat:4@high
    absmax:8i   {}.absmax            flat/block
    levels:32f  {}.quant_map         *16
    outer:32f   {}.nested_absmax     flat/outer
    ladder:32f  {}.nested_quant_map  *256
    state       {}.quant_state.bitsandbytes__nf4|{}.quant_state.bitsandbytes__fp4  *
"""
BNB_INT8 = """
    codes:8     {}                   out in
    scale:32f   SCB                  out
"""
TORCHAO = """
    codes:8     _{}_qdata            out in
    scale:32s   _{}_scale            out/rows in/cols
    zero:8n?    _{}_zero_point       out/rows in/cols
    inputs:32f? _{}_act_pre_scale    in/inputs
"""

TORCHAO_UNUSED = "_{}_act_quant_scale _{}_act_quant_zero_point"

CT, BNB = "compressed-tensors", "bitsandbytes"
_shaped = partial(Format, unused=ACTIVATIONS, state=values.shape_of)

FORMATS: tuple[Format, ...] = (
    Format("FP8", "fp8", SCALED, values.scaled_exactly, F8, unused=ACTIVATIONS),
    Format("FP4 in blocks", "fp8", FP4_BLOCKS, values.float4, "int8"),
    Format(
        "FP8 by rows",
        "fbgemm_fp8",
        FP8_ROWS,
        values.scaled,
        F8,
        unused=ACTIVATIONS,
        parameters={"cols": None},
    ),
    Format("MXFP4", "mxfp4", MXFP4, values.float4, "uint8", axes=("in", "out")),
    Format("compressed-tensors", CT, COMPRESSED, values.scaled, f"{F8} int8", unused=ACTIVATIONS),
    _shaped("compressed-tensors, packed", CT, CT_PACKED, values.packed, "int32"),
    _shaped(
        "compressed-tensors, packed, one scale", CT, CT_ONE_SCALE, values.packed_signed, "int32"
    ),
    Format("NVFP4", CT, NVFP4, values.nvfloat4, "uint8", unused=ACTIVATIONS),
    Format("MXFP4, packed", CT, MXFP4_PACKED, values.float4, "uint8", unused=ACTIVATIONS),
    Format("MXFP6, packed", CT, MXFP6_PACKED, values.float6, "uint8", unused=ACTIVATIONS),
    Format("ModelOpt FP8", "modelopt", SCALED, values.scaled, F8, unused=ACTIVATIONS),
    Format(
        "ModelOpt NVFP4", "modelopt", MODELOPT_NVFP4, values.nvfloat4, "uint8", unused=ACTIVATIONS
    ),
    Format("GPTQ", "gptq", GPTQ, values.packed, "int32"),
    Format("AWQ", "awq", AWQ, values.packed, "int32"),
    Format("bitsandbytes 4bit", BNB, BNB_4BIT, values.levels, "uint8", state=values.flat_state),
    Format(
        "bitsandbytes, nested scales, 4bit",
        BNB,
        NESTED,
        values.levels,
        "uint8",
        state=values.nested_state,
    ),
    Format("bitsandbytes int8", BNB, BNB_INT8, values.int8, "int8", unused="weight_format"),
    Format("torchao", "torchao", TORCHAO, values.scaled, f"{F8} int8", unused=TORCHAO_UNUSED),
)


def formats(method: str) -> list[Format]:
    """Return the formats of a `quant_method`, those of other packages first."""
    added = [form for point in metadata.entry_points(group=GROUP) for form in point.load()]
    return [form for form in (*added, *FORMATS) if form.method == method]
