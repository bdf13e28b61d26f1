"""The table of formats against the packages' own code that quantizes, packs and dequantizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quantized_packages import WAYS, Packed, Way, words
from tests.checkpoint.quantized_make import Made
from tests.checkpoint.test_quantized import indexed, opened, part, runs

PACKED = {name: way for name, way in WAYS.items() if not way.experts}
SHAPES = st.tuples(st.integers(1, 5).map(lambda n: 16 * n), st.integers(1, 6).map(lambda n: 32 * n))


def read(packed: Packed, way: Way, directory: Path, ranges: Any = None) -> torch.Tensor:
    checkpoint = opened(Made(packed.stored, way.config(), packed.weight), directory)
    return part(checkpoint, ranges or [[(0, size)] for size in packed.weight.shape])[0]


@pytest.mark.parametrize("name", PACKED)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_equal_to_the_package(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    way = PACKED[name]
    if way.package:
        pytest.importorskip(way.package)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    if not way.package:
        dtype = torch.float32  # packed here
    # Some weights are all positive, so that zero points are at the end of their range.
    weight = torch.randn(data.draw(SHAPES)) + data.draw(st.sampled_from([0, 0, 9]))
    packed = way.pack(weight.to(dtype))
    ranges = [data.draw(runs(size)) for size in weight.shape]
    got = read(packed, way, tmp_path_factory.mktemp("packed"), ranges).to(packed.weight.dtype)
    torch.testing.assert_close(got, indexed(packed.weight, ranges), rtol=1e-6, atol=0)


def test_zero_points_of_gptq_are_read_with_carry(tmp_path: Path) -> None:
    """A zero point of 0 borrows from the next one in its word, as gptqmodel's own code does."""
    way = WAYS["GPTQ int4"]
    weight = torch.rand(16, 64) + torch.arange(16).view(-1, 1) % 3  # some zero points are 0
    packed = way.pack(weight - (torch.arange(16).view(-1, 1) % 2))
    zero = (packed.stored["qzeros"].long() + 0x11111111).to(torch.int32)
    nibbles = torch.stack([zero >> (4 * k) & 15 for k in range(8)])
    assert (nibbles == 0).any() and (nibbles != 0).any()
    torch.testing.assert_close(read(packed, way, tmp_path), packed.weight.float(), rtol=0, atol=0)


@pytest.mark.parametrize("block", [(32, 32), (40, 56)])
def test_fp8_blocks_as_compressed_tensors_reads_them(block: Any, tmp_path: Path) -> None:
    name = "compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer"
    reader = pytest.importorskip(name).FP8BlockDequantizer(
        targets=["Linear"], weight_block_size=block, dtype=torch.float32
    )
    way = WAYS["FP8, blocks" if block == (32, 32) else "FP8, blocks that do not divide"]
    packed = way.pack(torch.randn(96, 160))
    dense = reader._create_dequantized_weight(*packed.stored.values())
    torch.testing.assert_close(read(packed, way, tmp_path), dense, rtol=0, atol=0)


def test_nvfp4_in_bfloat16_is_that_of_the_package(tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    way = WAYS["NVFP4"]
    packed = way.pack(torch.randn(64, 96))
    config = quantization.QuantizationConfig.model_validate(way.config())
    compressor = compressors.BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    dense = compressor.decompress(packed.stored, config.config_groups["group_0"])["weight"]
    assert torch.equal(read(packed, way, tmp_path).bfloat16(), dense)


def test_scales_of_inputs_are_those_of_torchao(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    way, inputs = WAYS["torchao int8"], torch.rand(64) + 0.5
    held: Any = quantization.Int8Tensor.from_hp(
        torch.randn(48, 64), quantization.PerRow(), act_pre_scale=inputs
    )
    stored = {"_weight_qdata": held.qdata, "_weight_scale": held.scale}
    stored["_weight_act_pre_scale"] = inputs
    if held.zero_point is not None:
        stored["_weight_zero_point"] = held.zero_point
    got = read(Packed(stored, held.dequantize()), way, tmp_path)
    x = torch.randn(3, 64)
    torch.testing.assert_close(x @ got.T, torch.nn.functional.linear(x, held))


def test_words_are_those_of_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-8, 8, (16, 64), dtype=torch.int8)
    assert torch.equal(helpers.pack_to_int32(codes, 4), words(codes.long() + 8, 4, 1))
