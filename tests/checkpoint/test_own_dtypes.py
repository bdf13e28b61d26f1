"""Tensors that stay in a dtype of their own, whatever a model is loaded in, as in transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwright
from tests import planning, zoo
from tests.checkpoint.test_load import same

ALIKE = (
    # The class lists a buffer of its router.
    ("causal", "deepseek_v3", torch.bfloat16, "narrow"),
    # The code of a layer states a dtype.
    ("causal", "hunyuan_v1_moe", torch.bfloat16, "wide"),
    # Angles, which are computed before they are rounded.
    ("causal", "gptj", torch.bfloat16, "narrow"),
    # Listed for float16 alone; most bytes are kept in float32.
    ("seq2seq", "t5", torch.float16, "narrow"),
    # A buffer in the dtype of the model.
    ("seq2seq", "m2m_100", torch.bfloat16, "wide"),
)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():  # `load` makes one
        dist.destroy_process_group()


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize(("kind", "name", "dtype", "stored"), ALIKE)
def test_dtypes_of_transformers(
    tmp_path: Path, kind: str, name: str, dtype: torch.dtype, stored: str
) -> None:
    _, model = zoo.build(name, kind=kind)
    cls: Any = type(model)
    model.save_pretrained(tmp_path / "wide")  # type: ignore[operator]
    reference = cls.from_pretrained(tmp_path / "wide", dtype=dtype).eval()
    folder, asked = tmp_path / "wide", dtype
    if stored == "narrow":
        folder, asked = tmp_path / "narrow", None
        reference.save_pretrained(folder)
    plan = planning.plan(folder, 1)
    got: Any = shardwright.load(folder, plan, dtype=asked)
    assert got.config.dtype == dtype
    local, expected = tensors(got), tensors(reference)
    assert local.keys() == expected.keys()
    for path, tensor in expected.items():
        found = getattr(local[path], "to_local", lambda p=path: local[p])()
        assert found.dtype == tensor.dtype, path
        assert torch.equal(found, tensor), path


def test_narrow_weights_are_widened(tmp_path: Path) -> None:
    """A checkpoint that was written in bfloat16 throughout."""
    _, model = zoo.build("ernie4_5_moe")
    cls: Any = type(model)
    model.bfloat16().save_pretrained(tmp_path)  # type: ignore[operator]
    reference = cls.from_pretrained(tmp_path)
    gate = "model.layers.1.mlp.gate.weight"
    assert reference.get_parameter(gate).dtype == torch.float32
    plan = planning.plan(tmp_path, 1)
    got: Any = shardwright.load(tmp_path, plan)
    assert got.get_parameter(gate).to_local().dtype == torch.float32
    shardwright.save(got, tmp_path / "out")
    same(cls.from_pretrained(tmp_path / "out"), reference)
