"""Weights quantized by the packages that define the formats, on the CPU.

`WAYS` has one entry for each format. A way quantizes single weights; or, with `quantizer`, has
transformers quantize and save a model. GPTQ has no package that runs here, and is packed by a few
lines that follow its published layout.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.quantize import spread

GROUP = 32


class Packed(NamedTuple):
    """What is stored of a weight (name behind the module's -> tensor), and its numbers."""

    stored: dict[str, Tensor]
    weight: Tensor


@dataclass(frozen=True)
class Way:
    """How models are quantized.

    Attributes:
        package: the package that quantizes; "" if it is done here.
        pack: quantizes a weight.
        config: makes the `quantization_config`.
        quantizer: makes what `from_pretrained` takes, if transformers quantizes and saves.
        experts: the weights are stacks of experts.
    """

    package: str
    pack: Callable[[Tensor], Packed]
    config: Callable[[], dict[str, Any]] = field(default=dict)
    quantizer: Callable[[], Any] | None = None
    experts: bool = False


def _package(name: str) -> Any:
    """Import a module that need not be installed."""
    return import_module(name)


def _blocks(weight: Tensor, rows: int, columns: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce each block of a weight; blocks at the ends may be smaller."""
    parts = [[reduce(b) for b in a.split(columns, 1)] for a in weight.split(rows, 0)]
    return torch.stack([torch.stack(row) for row in parts])


def _fp8(
    weight: Tensor, rows: int = 0, columns: int = 0, exponents: str = "", name: str = ""
) -> Packed:
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    scale = _blocks(weight, rows, columns, lambda b: b.abs().max()) / 448
    if exponents:
        scale = scale.log2().ceil().exp2()
    wide = spread(scale, (rows, columns), weight.shape)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    stored = scale if scale.numel() > 1 else scale.view(())
    if exponents:
        stored = stored.to(torch.float8_e8m0fnu)
    if exponents == "bytes":
        stored = stored.view(torch.uint8)
    return Packed({"weight": codes, name or "weight_scale_inv": stored}, codes.float() * wide)


def _fp8_config(rows: int = 0, columns: int = 0, exponents: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    out["weight_block_size"] = [rows, columns] if rows else None
    out["scale_fmt"] = "ue8m0" if exponents else "float"
    return out | {"modules_to_not_convert": ["lm_head"]}


def _fp8_way(*block: int, exponents: str = "", name: str = "") -> Way:
    pack = lambda w: _fp8(w, *block, exponents=exponents, name=name)  # noqa: E731
    return Way("", pack, lambda: _fp8_config(*block, exponents=exponents))


def _fp8_rows(weight: Tensor) -> Packed:
    return _fp8(weight, 1, weight.shape[1], name="weight_scale")


def _mxfp4(weight: Tensor) -> Packed:
    """Pack random numbers, for a weight [experts, in, out]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    experts, rows, columns = weight.shape
    shape = experts, columns, rows // 32
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    scales = torch.randint(118, 122, shape, dtype=torch.uint8)
    dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return Packed({"_blocks": blocks, "_scales": scales}, dense)


def _scheme(form: str, bits: int, strategy: str, **more: Any) -> Any:
    quantization = _package("compressed_tensors.quantization")
    QuantizationArgs = quantization.QuantizationArgs
    QuantizationScheme = quantization.QuantizationScheme

    weights = QuantizationArgs(num_bits=bits, strategy=strategy, **more)
    active = None
    if form in ("int-quantized", "float-quantized"):
        kind = more.get("type", "int")
        active = QuantizationArgs(num_bits=8, type=kind, strategy="token", dynamic=True)
    return QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=active, format=form
    )


def _compressed(weight: Tensor, form: str, bits: int, strategy: str, **more: Any) -> Packed:
    BaseCompressor = _package("compressed_tensors.compressors").BaseCompressor
    utils = _package("compressed_tensors.quantization.utils")
    calculate_qparams = utils.calculate_qparams
    generate_gparam = utils.generate_gparam

    scheme = _scheme(form, bits, strategy, **more)
    args = scheme.weights
    rows, columns = {
        "tensor": weight.shape,
        "channel": (1, weight.shape[1]),
        "block": args.block_structure,
    }.get(strategy) or (1, args.group_size)
    least, most = (_blocks(weight, rows, columns, reduce) for reduce in (torch.amin, torch.amax))
    state: dict[str, Tensor] = {"weight": weight}
    whole = None
    if strategy == "tensor_group":
        whole = state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    if strategy == "tensor":
        least, most = least.view(1), most.view(1)
    scale, zero = calculate_qparams(least, most, args, global_scale=whole)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    stored = {k: v.data for k, v in compressor.compress(state, scheme).items()}
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    if whole is None:
        return Packed(stored, compressor.decompress(stored, scheme)["weight"])
    return Packed(stored, _nvfp4(stored, args))


def _nvfp4(stored: dict[str, Tensor], args: Any) -> Tensor:
    """Compute the weight in float32; `decompress` gives it rounded to bfloat16."""
    unpack_fp4_from_uint8 = _package(
        "compressed_tensors.compressors.nvfp4.helpers"
    ).unpack_fp4_from_uint8
    dequantize = _package("compressed_tensors.quantization.lifecycle.forward").dequantize

    packed, scale = stored["weight_packed"], stored["weight_scale"].float()
    rows, columns = packed.shape
    codes = unpack_fp4_from_uint8(packed, rows, columns * 2, dtype=torch.float32)
    whole = stored["weight_global_scale"]
    return dequantize(codes, scale, args=args, global_scale=whole, dtype=torch.float32)


def _compressed_config(form: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    quantization = _package("compressed_tensors.quantization")
    QuantizationConfig = quantization.QuantizationConfig
    QuantizationStatus = quantization.QuantizationStatus

    scheme = _scheme(form, bits, strategy, **more)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
    )
    return config.model_dump(mode="json")


def _compressed_way(form: str, bits: int, strategy: str, **more: Any) -> Way:
    told = {"form": form, "bits": bits, "strategy": strategy, **more}
    pack, config = partial(_compressed, **told), partial(_compressed_config, **told)
    return Way("compressed_tensors", pack, config)


def words(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> Tensor:
    """Pack codes into int32 along a dim; place k of a word holds its element `order[k]`."""
    per = 32 // bits
    codes = codes.long().movedim(dim, -1).unflatten(-1, (-1, per))
    word = torch.zeros_like(codes[..., 0])
    for place, element in enumerate(order or range(per)):
        word |= codes[..., element] << (bits * place)
    return word.to(torch.int32).movedim(-1, dim).contiguous()


def _integers(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [in, out], and zero points and scales [groups, out]."""
    turned, most = weight.T, (1 << bits) - 1
    members = [turned[groups == g] for g in range(int(groups.max()) + 1)]
    least = torch.stack([m.amin(0) for m in members]).clamp(max=0)
    scale = ((torch.stack([m.amax(0) for m in members]).clamp(min=0) - least) / most).half()
    zero = (-least / scale.float()).round().clamp(0, most).long()
    codes = (turned / scale.float()[groups]).round().long() + zero[groups]
    return codes.clamp(0, most), zero, scale


def _gptq(weight: Tensor, bits: int = 4, ordered: bool = False, less: int = 1) -> Packed:
    groups = torch.arange(weight.shape[1]) // GROUP
    if ordered:
        groups = groups[torch.randperm(len(groups))]
    codes, zero, scale = _integers(weight, bits, groups)
    stored = {"qweight": words(codes, bits, 0), "g_idx": groups.int(), "scales": scale}
    # As gptqmodel does: 1 is subtracted from each place of a word, with carry.
    ones = sum(less << (bits * place) for place in range(32 // bits))
    stored["qzeros"] = (words(zero, bits, 1).long() - ones).to(torch.int32)
    return Packed(stored, ((codes - zero[groups]).half() * scale[groups]).T.contiguous())


def _gptq_way(bits: int = 4, ordered: bool = False, version: str = "gptq") -> Way:
    pack = partial(_gptq, bits=bits, ordered=ordered, less=int(version == "gptq"))
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered}
    return Way("", pack, lambda: config | {"checkpoint_format": version, "sym": False})


AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq(weight: Tensor, zero_point: bool = True) -> Packed:
    """Pack as AWQ, and compute the numbers by compressed-tensors' reader of AWQ."""
    BaseCompressor = _package("compressed_tensors.compressors").BaseCompressor
    AutoAWQConverter = _package(
        "compressed_tensors.entrypoints.convert.converters.autoawq"
    ).AutoAWQConverter

    groups = torch.arange(weight.shape[1]) // GROUP
    codes, zero, scale = _integers(weight, 4, groups)
    stored = {"qweight": words(codes, 4, 1, AWQ), "scales": scale}
    if zero_point:
        stored["qzeros"] = words(zero, 4, 1, AWQ)
    reader = AutoAWQConverter(group_size=GROUP, zero_point=zero_point)
    read = reader.process({f"m.{name}": tensor for name, tensor in stored.items()})
    scheme = _scheme("pack-quantized", 4, "group", group_size=GROUP, symmetric=not zero_point)
    compressor: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    state = {name.removeprefix("m."): tensor for name, tensor in read.items()}
    return Packed(stored, compressor.decompress(state, scheme)["weight"])


def _awq_way(zero_point: bool = True) -> Way:
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    pack = partial(_awq, zero_point=zero_point)
    return Way("compressed_tensors", pack, lambda: config | {"zero_point": zero_point})


def _four_bits(weight: Tensor, kind: str, nested: bool = False) -> Packed:
    functional = _package("bitsandbytes").functional

    codes, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=64, quant_type=kind, compress_statistics=nested
    )
    stored = {f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    return Packed({"weight": codes, **stored}, four_bit_numbers(codes, state))


def four_bit_numbers(codes: Tensor, state: Any) -> Tensor:
    """Compute the weight as one row.

    On the CPU, `dequantize_4bit` of bitsandbytes 0.50 is wrong where the blocks of a weight, which
    are counted row by row, do not end with its rows.
    """
    functional = _package("bitsandbytes").functional

    flat, shape = copy(state), state.shape
    flat.shape = torch.Size([shape.numel()])
    return functional.dequantize_4bit(codes, flat).view(shape)


def _eight_bits(weight: Tensor) -> Packed:
    functional = _package("bitsandbytes").functional

    codes, scale, _ = functional.int8_vectorwise_quant(weight.half())
    stored = {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Packed(stored, functional.int8_vectorwise_dequant(codes, scale))


def _bits(pack: Callable[[Tensor], Packed], **options: Any) -> Way:
    from transformers import BitsAndBytesConfig

    make = partial(BitsAndBytesConfig, **options)
    return Way("bitsandbytes", pack, lambda: make().to_dict(), make)


def _torchao(weight: Tensor, config: Callable[[], Any]) -> Packed:
    quantize_ = _package("torchao.quantization").quantize_

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    quantize_(layer, config())
    held: Any = layer.weight
    names = [*held.tensor_data_names, *getattr(held, "optional_tensor_data_names", [])]
    tensors = {name: getattr(held, name) for name in names}
    stored = {f"_weight_{name}": t for name, t in tensors.items() if t is not None}
    return Packed(stored, held.dequantize())


def _torchao_way(config: Callable[[], Any]) -> Way:
    def quantizer() -> Any:
        from transformers import TorchAoConfig

        return TorchAoConfig(config())

    pack = partial(_torchao, config=config)
    return Way("torchao", pack, lambda: quantizer().to_dict(), quantizer)


def _intx(bits: int, rows: bool = False) -> Any:
    IntxWeightOnlyConfig = _package("torchao.quantization").IntxWeightOnlyConfig
    granularity = _package("torchao.quantization.granularity")
    PerAxis = granularity.PerAxis
    PerGroup = granularity.PerGroup

    dtype = getattr(torch, f"int{bits}")
    return IntxWeightOnlyConfig(dtype, PerAxis(0) if rows else PerGroup(GROUP))


def _named(name: str) -> Any:
    return getattr(_package("torchao.quantization"), name)()


FLOAT = {"type": "float"}

WAYS: dict[str, Way] = {
    "FP8, blocks": _fp8_way(32, 32),
    "FP8, blocks that do not divide": _fp8_way(40, 56),
    "FP8, one scale": _fp8_way(),
    "FP8, scales named .scale": _fp8_way(32, 32, name="scale"),
    "FP8, scales named .qscale_weight": _fp8_way(name="qscale_weight"),
    "FP8, scales of 8-bit exponents": _fp8_way(32, 32, exponents="float8"),
    "FP8, exponents as bytes": _fp8_way(32, 32, exponents="bytes"),
    "FP8, by rows": Way("", _fp8_rows, lambda: {"quant_method": "fbgemm_fp8"}),
    "MXFP4, experts": Way("", _mxfp4, lambda: {"quant_method": "mxfp4"}, experts=True),
    "int4, groups": _compressed_way("pack-quantized", 4, "group", group_size=32),
    "int4, groups, zero points": _compressed_way(
        "pack-quantized", 4, "group", group_size=32, symmetric=False
    ),
    "int4, rows": _compressed_way("pack-quantized", 4, "channel"),
    "int8, groups": _compressed_way("pack-quantized", 8, "group", group_size=32),
    "int8, rows, zero points": _compressed_way("pack-quantized", 8, "channel", symmetric=False),
    "int4, one scale": _compressed_way("pack-quantized", 4, "tensor"),
    "int4, one scale, zero point": _compressed_way("pack-quantized", 4, "tensor", symmetric=False),
    "int3, groups": _compressed_way("pack-quantized", 3, "group", group_size=32),
    "int6, rows, zero points": _compressed_way("pack-quantized", 6, "channel", symmetric=False),
    "W8A8, rows": _compressed_way("int-quantized", 8, "channel"),
    "W8A8, one scale": _compressed_way("int-quantized", 8, "tensor"),
    "int8, groups, unpacked, zero points": _compressed_way(
        "naive-quantized", 8, "group", group_size=32, symmetric=False
    ),
    "FP8 activations too, one scale": _compressed_way("float-quantized", 8, "tensor", **FLOAT),
    "FP8 activations too, rows": _compressed_way("float-quantized", 8, "channel", **FLOAT),
    "FP8 activations too, blocks": _compressed_way(
        "float-quantized", 8, "block", block_structure=[40, 56], **FLOAT
    ),
    "NVFP4": _compressed_way("nvfp4-pack-quantized", 4, "tensor_group", group_size=16, **FLOAT),
    "MXFP4": _compressed_way(
        "mxfp4-pack-quantized", 4, "group", group_size=32, scale_dtype=torch.uint8, **FLOAT
    ),
    "MXFP6": _compressed_way(
        "mxfp6-pack-quantized", 6, "group", group_size=32, scale_dtype=torch.uint8, **FLOAT
    ),
    "MXFP8": _compressed_way(
        "mxfp8-quantized", 8, "group", group_size=32, scale_dtype=torch.uint8, **FLOAT
    ),
    "GPTQ int4": _gptq_way(),
    "GPTQ int4, order of activations": _gptq_way(ordered=True),
    "GPTQ int8": _gptq_way(8),
    "GPTQ int2": _gptq_way(2),
    "GPTQ int4, version 2": _gptq_way(version="gptq_v2"),
    "AWQ": _awq_way(),
    "AWQ, no zero points": _awq_way(zero_point=False),
    "nf4": _bits(partial(_four_bits, kind="nf4"), load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4, nested scales": _bits(
        partial(_four_bits, kind="nf4", nested=True),
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    ),
    "fp4": _bits(partial(_four_bits, kind="fp4"), load_in_4bit=True),
    "bitsandbytes int8": _bits(_eight_bits, load_in_8bit=True),
    "torchao int8": _torchao_way(partial(_named, "Int8WeightOnlyConfig")),
    "torchao int4": _torchao_way(partial(_intx, 4)),
    "torchao int8, rows": _torchao_way(partial(_intx, 8, rows=True)),
    "torchao FP8": _torchao_way(partial(_named, "Float8WeightOnlyConfig")),
}
