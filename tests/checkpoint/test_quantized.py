"""Quantized weights: any part of one is that part of the whole, and takes only its own bytes."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from shardwright.errors import CheckpointError, UsageError
from shardwright.runtime.checkpoint.names import Source
from shardwright.runtime.checkpoint.reader import Reader
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.quantized.config import read_quantization
from shardwright.runtime.quantized.formats import FORMATS
from shardwright.runtime.quantized.kept import KeptWeight
from tests.checkpoint.quantized_make import MAKERS, Made, awq, compressed, fp8, gptq, nf4, packed

NAME = "layer.weight"


def opened(made: Made, directory: Path) -> Checkpoint:
    stored = {f"layer.{name}": tensor for name, tensor in made.stored.items()}
    save_file(stored, directory / "model.safetensors")
    quantization = read_quantization(SimpleNamespace(quantization_config=made.config))
    assert quantization is not None
    return Checkpoint.open(directory).dequantized(quantization, torch.float32)


def part(checkpoint: Checkpoint, ranges: list[list[tuple[int, int]]]) -> tuple[Tensor, int]:
    reader = Reader(checkpoint)
    sizes = [sum(b - a for a, b in dim) for dim in ranges]
    out = torch.empty(sizes)
    reader.fill(out, Source(NAME), ranges)
    return out, reader.read


def indexed(weight: Tensor, ranges: list[list[tuple[int, int]]]) -> Tensor:
    for d, dim in enumerate(ranges):
        weight = weight.index_select(d, torch.cat([torch.arange(a, b) for a, b in dim]))
    return weight


def runs(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ascending ranges of indices, as ranks hold them; not all empty."""
    cuts = st.lists(st.integers(0, size), min_size=2, max_size=6, unique=True)
    return cuts.map(lambda at: [*zip(sorted(at)[::2], sorted(at)[1::2], strict=False)])


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_part_is_that_of_the_whole(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    made = MAKERS[name](data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70)))
    checkpoint = opened(made, tmp_path_factory.mktemp("quantized"))
    whole = checkpoint.tensors[NAME]
    assert whole.shape == tuple(made.weight.shape)
    assert [*checkpoint.tensors] == [NAME]
    ranges = [data.draw(runs(size)) for size in whole.shape]
    expected = indexed(made.weight.float(), ranges)
    got, _ = part(checkpoint, ranges)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    kept = Reader(checkpoint).kept(Source(NAME), ranges, torch.float32)
    assert isinstance(kept, KeptWeight)
    with mock.patch("shardwright.runtime.quantized.kept.AT_ONCE", data.draw(st.integers(1, 99))):
        assert torch.equal(kept.dense(), got)
        for row in {0, -1}:
            assert torch.equal(kept[row], got[row])
        column = data.draw(st.integers(0, got.shape[1] - 1))
        assert torch.equal(kept.t()[column], got[:, column])
    assert torch.equal(kept.dense(), got)
    assert torch.equal(
        kept.t() @ torch.ones(got.shape[0], 2), got.t() @ torch.ones(got.shape[0], 2)
    )


# In the order of activations, the columns of a part belong to groups all over the weight.
@pytest.mark.parametrize("name", [name for name in MAKERS if "order" not in name])
def test_parts_take_their_share_of_bytes(name: str, tmp_path: Path) -> None:
    made = MAKERS[name](512, 1024)
    checkpoint = opened(made, tmp_path)
    rows, columns = checkpoint.tensors[NAME].shape
    for ranges in ([[(0, rows // 2)], [(0, columns)]], [[(0, rows)], [(0, columns // 2)]]):
        _, read = part(checkpoint, ranges)
        kept = Reader(checkpoint).kept(Source(NAME), ranges, torch.float32)
        assert kept is not None
        # What belongs to all rows or columns is read by each rank: the order of groups, levels.
        shared = 4 * (rows + columns) + 2048
        assert read <= checkpoint.nbytes / 2 + shared
        assert kept.held_bytes <= checkpoint.nbytes / 2 + shared


def test_a_weight_that_is_held_as_stored_never_changes(tmp_path: Path) -> None:
    made = gptq(16, 24)
    kept = Reader(opened(made, tmp_path)).kept(Source(NAME), [[(0, 16)], [(0, 24)]], torch.float32)
    assert kept is not None
    for write in (kept.zero_, lambda: kept.t().mul_(2), lambda: kept.copy_(torch.ones(16, 24))):
        with pytest.raises(UsageError, match="dequantize=True"):
            write()
    with pytest.raises(UsageError, match=r"shardwright\.save"):
        torch.save(kept, tmp_path / "kept.pt")
    kept.copy_(kept.detach())
    for same in (copy.deepcopy(kept), kept.clone(), kept.to(torch.float32), kept.t().t()):
        assert isinstance(same, KeptWeight)
        assert torch.equal(same.dense(), kept.dense())
    moved: Any
    for moved in (kept, kept.t()):  # strides are those of what is computed
        assert moved.stride() == moved.dense().stride()
        assert torch.equal(moved.reshape(-1), moved.dense().reshape(-1))
        assert torch.equal(moved.contiguous().view(-1), moved.dense().reshape(-1))


def test_each_format_is_made() -> None:
    methods = {MAKERS[name](8, 16).config["quant_method"] for name in MAKERS}
    assert methods | {"mxfp4"} == {form.method for form in FORMATS}


def edited(made: Made, **stored: Any) -> Made:
    tensors = {**made.stored, **stored}
    return made._replace(stored={n: t for n, t in tensors.items() if t is not None})


def grouped(**columns: int) -> Any:
    """Return a config in which each target has groups of so many columns."""
    config = compressed("pack-quantized", 4, "group")
    weights = config["config_groups"]["group_0"]["weights"]
    groups = {
        name: {"targets": [name], "weights": {**weights, "group_size": size}}
        for name, size in columns.items()
    }
    return {**config, "config_groups": groups}


BROKEN: dict[str, tuple[Made, str]] = {
    "no scales": (edited(fp8(16, 16), weight_scale_inv=None), "has no scales"),
    "scales of another shape": (
        edited(fp8(16, 16), weight_scale_inv=torch.ones(3, 2)),
        r"weight_scale_inv has shape \[3, 2\]",
    ),
    "blocks of a size that is not said": (
        fp8(16, 16)._replace(config={"quant_method": "fp8"}),
        r"weight_scale_inv has shape \[2, 2\]",
    ),
    "a block size of 0": (
        fp8(16, 16)._replace(config={"quant_method": "fp8", "weight_block_size": [0, 128]}),
        "not a number above 0",
    ),
    "a block size that is no pair": (
        fp8(16, 16)._replace(config={"quant_method": "fp8", "weight_block_size": 128}),
        "not a pair of numbers",
    ),
    "another format": (
        fp8(16, 16)._replace(config={"quant_method": "gptq", "bits": 4}),
        "no scales as gptq stores them",
    ),
    "another method": (
        gptq(16, 16)._replace(config={"quant_method": "fp8"}),
        "no tensor is stored so",
    ),
    "an unknown method": (fp8(8, 8)._replace(config={"quant_method": "magic"}), "not known here"),
    "other bits": (
        packed(16, 16)._replace(config={**gptq(8, 8).config, "bits": 3}),
        "no tensor is stored so",
    ),
    "activations that are rotated": (
        packed(16, 16)._replace(
            config={**packed(16, 16).config, "transform_config": {"config_groups": {"R1": {}}}}
        ),
        "transform_config",
    ),
    "zero points of another shape": (
        edited(gptq(16, 16), qzeros=torch.ones(1, 1, dtype=torch.int32)),
        r"qzeros has shape \[1, 1\]",
    ),
    "zero points that are missing": (
        edited(packed(16, 16, zeros=True), weight_zero_point=None),
        "weight_zero_point is missing",
    ),
    "an order of activations that is missing": (
        edited(gptq(16, 16, ordered=True), g_idx=None),
        "g_idx is missing",
    ),
    "scales that are integers": (
        edited(fp8(16, 16), weight_scale_inv=torch.ones(2, 2, dtype=torch.int32)),
        "weight_scale_inv is int32",
    ),
    "bytes for scales": (
        edited(fp8(16, 16), weight_scale_inv=torch.ones(2, 2, dtype=torch.uint8)),
        "weight_scale_inv is uint8",
    ),
    "too few groups": (
        edited(gptq(16, 16), scales=torch.ones(1, 16).half()),
        r"scales has shape \[1, 16\]",
    ),
    "too few levels": (
        edited(nf4(16, 16), **{"weight.quant_map": torch.ones(15)}),
        "quant_map has 15 elements, not 16",
    ),
    "scales of scales that are missing": (
        edited(nf4(16, 16, 8, nested=True), **{"weight.nested_absmax": None}),
        "absmax is uint8",
    ),
    "an order that is of other bits": (
        awq(16, 16)._replace(config={**awq(8, 8).config, "bits": 8}),
        "not packed in this order",
    ),
    "a weight that is stored twice": (
        edited(packed(16, 16), weight=torch.ones(16, 16)),
        "layer.weight is stored twice",
    ),
    "a pattern that is none": (
        fp8(8, 8)._replace(config={**fp8(8, 8).config, "modules_to_not_convert": ["re:("]}),
        "cannot be read",
    ),
    "another group of the config": (
        packed(16, 16)._replace(config=grouped(Linear=8, layer=4)),
        "not stored as the config says",
    ),
    "a shape that is none": (
        edited(packed(16, 16), weight_shape=torch.tensor([1])),
        "not stored as the config says",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_belong_together_is_refused(case: str, tmp_path: Path) -> None:
    made, message = BROKEN[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(made, tmp_path)
    assert "\n" not in str(caught.value)
    assert json.dumps(made.config)


def test_a_target_that_is_a_name_comes_before_a_class(tmp_path: Path) -> None:
    """Groups of 9 or of 10 columns fit the shapes of 36 as well."""
    made = packed(16, 36, 4, 10)._replace(config=grouped(Linear=9, layer=10))
    got, _ = part(opened(made, tmp_path), [[(0, 16)], [(0, 36)]])
    torch.testing.assert_close(got, made.weight, rtol=1e-6, atol=0)


def test_older_names_of_sizes_are_read() -> None:
    sizes = []
    older: list[dict[str, Any]] = [
        {"strategy": "block", "block_structure": "8x4"},
        {"group_size": -1},
    ]
    for told in older:
        config = compressed("float-quantized", 8, told.pop("strategy", None), **told)
        quantization = read_quantization(SimpleNamespace(quantization_config=config))
        assert quantization is not None
        sizes.append([quantization.schemes[0].parameters[key] for key in ("rows", "cols")])
    assert sizes == [[8, 4], [1, None]]


def test_groups_that_are_not_there_are_refused(tmp_path: Path) -> None:
    made = gptq(16, 24)
    checkpoint = opened(edited(made, g_idx=made.stored["g_idx"] + 1), tmp_path)
    with pytest.raises(CheckpointError, match="names groups that layer.qzeros does not have"):
        part(checkpoint, [[(0, 16)], [(0, 24)]])


def test_a_rank_that_holds_nothing_of_a_weight_knows_what_is_stored(tmp_path: Path) -> None:
    """With fewer experts than ranks, say: all ranks save the same tensors."""
    checkpoint = opened(gptq(16, 24), tmp_path)
    kept = Reader(checkpoint).kept(Source(NAME), [[], [(0, 24)]], torch.float32)
    assert kept is not None and kept.held_bytes == 0
    assert {*kept.held.stored} == {*checkpoint.stored}
    assert (torch.ones(2, 24) @ kept.t()).shape == (2, 0)
