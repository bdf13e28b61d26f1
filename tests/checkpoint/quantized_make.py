"""Quantized weights in each format of the table, packed as the packages that write them do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.quantize import spread

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


class Made(NamedTuple):
    """Stored tensors (suffix of the module's name -> tensor), the config, and the weight."""

    stored: dict[str, Tensor]
    config: dict[str, Any]
    weight: Tensor


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def pack(codes: Tensor, bits: int, dim: int, order: list[int] | None = None) -> Tensor:
    """Pack codes into int32 along `dim`: element `order[k]` of each word is at place k."""
    per = 32 // bits
    codes = codes.long().movedim(dim, -1)
    missing = -codes.shape[-1] % per
    codes = torch.nn.functional.pad(codes, (0, missing)).unflatten(-1, (-1, per))
    word = sum(codes[..., e] << (bits * k) for k, e in enumerate(order or range(per)))
    assert isinstance(word, Tensor)
    return (word - ((word >> 31) << 32)).int().movedim(-1, dim).contiguous()


def fp8(o: int, i: int, r: int = 8, c: int = 8) -> Made:
    codes = torch.randn(o, i).to(torch.float8_e4m3fn)
    scale = scales(ceil(o, r), ceil(i, c))
    config = {"quant_method": "fp8", "weight_block_size": [r, c]}
    weight = codes.float() * spread(scale, (r, c), (o, i))
    return Made({"weight": codes, "weight_scale_inv": scale}, config, weight)


def fp8_tensor(o: int, i: int) -> Made:
    codes, scale = torch.randn(o, i).to(torch.float8_e4m3fn), torch.tensor(0.25)
    stored = {"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.tensor(1.0)}
    return Made(stored, {"quant_method": "fp8"}, codes.float() * scale)


def fp8_rows(o: int, i: int) -> Made:
    codes, scale = torch.randn(o, i).to(torch.float8_e4m3fn), scales(o, 1)
    config = {"quant_method": "fbgemm_fp8"}
    return Made({"weight": codes, "weight_scale": scale}, config, codes.float() * scale)


def compressed(kind: str, bits: int, strategy: str, group: int | None = None, **more: Any) -> Any:
    weights = {"num_bits": bits, "strategy": strategy, "group_size": group, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


def int8_rows(o: int, i: int) -> Made:
    codes, scale = torch.randint(-128, 128, (o, i), dtype=torch.int8), scales(o, 1)
    config = compressed("int-quantized", 8, "channel")
    return Made({"weight": codes, "weight_scale": scale}, config, codes * scale)


def int8_zero(o: int, i: int) -> Made:
    codes, scale = torch.randint(-128, 128, (o, i), dtype=torch.int8), scales(o, 1)
    zero = torch.randint(-8, 8, (o, 1), dtype=torch.int8)
    stored = {"weight": codes, "weight_scale": scale, "weight_zero_point": zero}
    config = compressed("int-quantized", 8, "channel", symmetric=False)
    return Made(stored, config, (codes.float() - zero) * scale)


def packed(o: int, i: int, bits: int = 4, group: int | None = 8, zeros: bool = False) -> Made:
    codes = torch.randint(0, 1 << bits, (o, i))
    columns = group or i
    scale = scales(o, ceil(i, columns))
    zero = torch.full(scale.shape, 1 << (bits - 1))
    stored = {"weight_packed": pack(codes, bits, 1), "weight_scale": scale}
    stored["weight_shape"] = torch.tensor([o, i])
    if zeros:
        zero = torch.randint(0, 1 << bits, scale.shape)
        stored["weight_zero_point"] = pack(zero, bits, 0)
    strategy = "group" if group else "channel"
    config = compressed("pack-quantized", bits, strategy, group, symmetric=not zeros)
    less = (codes - spread(zero, (1, columns), (o, i))).float()
    return Made(stored, config, less * spread(scale, (1, columns), (o, i)))


def nvfp4(o: int, i: int) -> Made:
    codes = torch.randint(0, 16, (o, i + i % 2))
    scale, whole = scales(o, ceil(i, 16)).to(torch.float8_e4m3fn), torch.tensor([3.0])
    both = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    stored = {"weight_packed": both, "weight_scale": scale, "weight_global_scale": whole}
    config = compressed("nvfp4-pack-quantized", 4, "tensor_group", 16)
    wide = spread(scale.float() / whole, (1, 16), (o, codes.shape[1]))
    return Made(stored, config, torch.tensor(E2M1)[codes] * wide)


def modelopt(kind: str, *skipped: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": kind, "ignore": ["lm_head", *skipped]}


def modelopt_fp8(o: int, i: int) -> Made:
    codes, scale = torch.randn(o, i).to(torch.float8_e4m3fn), torch.tensor(0.25)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return Made(stored, modelopt("FP8"), codes.float() * scale)


def modelopt_mxfp8(o: int, i: int) -> Made:
    codes = torch.randn(o, i).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 130, (o, ceil(i, 32)), dtype=torch.uint8)
    scale = spread((exponents.float() - 127).exp2(), (1, 32), (o, i))
    stored = {"weight": codes, "weight_scale": exponents}
    return Made(stored, modelopt("MXFP8"), codes.float() * scale)


def modelopt_nvfp4(o: int, i: int) -> Made:
    made, whole = nvfp4(o, i), torch.tensor(0.125)
    packed, scale, divisor = made.stored.values()
    stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}
    return Made(stored, modelopt("NVFP4"), made.weight * divisor * whole)


def gptq(o: int, i: int, group: int = 8, ordered: bool = False) -> Made:
    i = ceil(i, 8) * 8
    o = ceil(o, 8) * 8
    codes, groups = torch.randint(0, 16, (i, o)), torch.arange(i) // group
    if ordered:
        groups = groups[torch.randperm(i)]
    zero, scale = torch.randint(1, 16, (ceil(i, group), o)), scales(ceil(i, group), o).half()
    stored = {"qweight": pack(codes, 4, 0), "qzeros": pack(zero - 1, 4, 1), "scales": scale}
    stored["g_idx"] = groups.int()
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": ordered}
    return Made(stored, config, ((codes - zero[groups]).half() * scale[groups]).T)


def awq(o: int, i: int, group: int = 8) -> Made:
    o, order = ceil(o, 8) * 8, [0, 2, 4, 6, 1, 3, 5, 7]
    codes, groups = torch.randint(0, 16, (i, o)), torch.arange(i) // group
    zero, scale = torch.randint(0, 16, (ceil(i, group), o)), scales(ceil(i, group), o).half()
    stored = {"qweight": pack(codes, 4, 1, order), "qzeros": pack(zero, 4, 1, order)}
    stored["scales"] = scale
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Made(stored, config, ((codes - zero[groups]).half() * scale[groups]).T)


def nf4(o: int, i: int, block: int = 64, nested: bool = False) -> Made:
    i = i + (o * i) % 2
    codes, levels = torch.randint(0, 16, (o * i,)), torch.linspace(-1, 1, 16)
    if len(codes) % 2:
        codes = torch.cat([codes, codes[:1]])
    absmax = scales(ceil(o * i, block))
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [o, i]}
    both = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)
    stored = {"weight": both[:, None], "weight.absmax": absmax, "weight.quant_map": levels}
    if nested:
        few, ladder = 4, torch.linspace(-1, 1, 256)
        inner = torch.randint(0, 256, absmax.shape, dtype=torch.uint8)
        outer = scales(ceil(len(inner), few))
        state |= {"nested_blocksize": few, "nested_dtype": "float32", "nested_offset": 0.75}
        stored |= {"weight.absmax": inner, "weight.nested_absmax": outer}
        stored["weight.nested_quant_map"] = ladder
        absmax = ladder[inner.long()] * outer.repeat_interleave(few)[: len(inner)] + 0.75
    text = json.dumps(state).encode()
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*text], dtype=torch.uint8)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    wide = absmax.repeat_interleave(block)[: o * i]
    return Made(stored, config, (levels[codes[: o * i]] * wide).view(o, i))


def bnb_int8(o: int, i: int) -> Made:
    codes, scale = torch.randint(-127, 128, (o, i), dtype=torch.int8), scales(o)
    stored = {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return Made(stored, config, codes * (scale / 127)[:, None])


def torchao(o: int, i: int, group: int = 8) -> Made:
    i = ceil(i, group) * group
    codes = torch.randint(-8, 8, (o, i), dtype=torch.int8)
    scale, zero = scales(o, i // group), torch.randint(-4, 4, (o, i // group), dtype=torch.int8)
    stored = {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": zero}
    weight = (codes.float() - spread(zero, (1, group), (o, i))) * spread(scale, (1, group), (o, i))
    return Made(stored, {"quant_method": "torchao"}, weight)


MAKERS: dict[str, Callable[[int, int], Made]] = {
    "fp8": fp8,
    "fp8, other blocks": lambda o, i: fp8(o, i, 5, 3),
    "fp8 by tensor": fp8_tensor,
    "fp8 by rows": fp8_rows,
    "int8 by rows": int8_rows,
    "int8 with zero points": int8_zero,
    "packed int4": packed,
    "packed int8": lambda o, i: packed(o, i, 8),
    "packed int4 by rows": lambda o, i: packed(o, i, 4, None),
    "packed int4 with zero points": lambda o, i: packed(o, i, zeros=True),
    "nvfp4": nvfp4,
    "ModelOpt FP8": modelopt_fp8,
    "ModelOpt MXFP8": modelopt_mxfp8,
    "ModelOpt NVFP4": modelopt_nvfp4,
    "gptq": gptq,
    "gptq in the order of activations": lambda o, i: gptq(o, i, ordered=True),
    "awq": awq,
    "nf4": nf4,
    "nf4 of nested scales": lambda o, i: nf4(o, i, 8, nested=True),
    "bitsandbytes int8": bnb_int8,
    "torchao": torchao,
}
