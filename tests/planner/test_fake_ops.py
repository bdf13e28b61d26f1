"""What stands in for a shape-only kernel says what the real kernel on the CPU says."""

from __future__ import annotations

import pytest
import torch

from shardwright.planner.trace.record.fake_mode import LikeReal

SHAPES = {
    "rows by experts": ((10, 8), (3, 8, 4)),
    "unaligned rows": ((10, 6), (3, 6, 8)),
    "unlike": ((10, 8), (3, 4, 8)),
    "both in groups": ((3, 5, 8), (3, 8, 4)),
    "unlike groups": ((3, 5, 8), (2, 8, 4)),
    "contraction in groups": ((4, 16), (16, 8)),
    "columns in groups": ((3, 5, 8), (8, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_grouped_product(name: str, dtype: torch.dtype) -> None:
    """The same shape, stride and dtype, or an error where the real one raises one."""
    left, right = SHAPES[name]
    x = torch.zeros(left, dtype=dtype)
    # As experts hold them: transposed.
    weight = torch.zeros(*right[:-2], right[-1], right[-2], dtype=dtype).transpose(-2, -1)
    grouped = len(left) == 2 or len(right) == 2
    offs = torch.tensor([2, 5, left[0] if len(right) == 3 else 16], dtype=torch.int32)

    def run(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> object:
        try:
            out = torch.nn.functional.grouped_mm(x, weight, offs=offs if grouped else None)
        except RuntimeError:
            return "refused"
        return tuple(out.shape), out.dtype

    fake = LikeReal()
    like = [fake.from_tensor(t) for t in (x, weight, offs)]
    want = run(x, weight, offs)
    with fake:
        assert run(*like) == want
    assert (want == "refused") == name.startswith("un") or dtype != torch.float32
