"""The boxes of reads cover what a rank holds once and stay small."""

import random

import pytest
import torch

from shardwright.planner.contract.dims import Range
from shardwright.runtime.checkpoint.reader import boxes, inside


def assemble(whole: torch.Tensor, ranges: list[list[Range]], chunk: int) -> torch.Tensor:
    """What the boxes give, NaN where they give nothing."""
    out = torch.full([sum(b - a for a, b in dim) for dim in ranges], torch.nan)
    for box in boxes(ranges, whole.element_size(), chunk):
        assert out[inside(box)].nbytes <= max(chunk, 4)
        assert out[inside(box)].isnan().all(), "read twice"
        out[inside(box)] = whole[torch.meshgrid(*(index for _, index in box), indexing="ij")]
    return out


def picked(whole: torch.Tensor, ranges: list[list[Range]]) -> torch.Tensor:
    for dim, held in enumerate(ranges):
        index = torch.cat([torch.arange(a, b) for a, b in held] or [torch.arange(0)])
        whole = whole.index_select(dim, index)
    return whole


@pytest.mark.parametrize("chunk", [8, 64, 2**20])
def test_random_ranges(chunk: int) -> None:
    rng = random.Random(0)
    for _ in range(20):
        shape = [rng.randint(1, 90) for _ in range(rng.randint(1, 3))]
        ranges = []
        for n in shape:
            cuts = sorted(rng.sample(range(n + 1), rng.randint(0, n // 2) * 2))
            ranges.append(list(zip(cuts[::2], cuts[1::2], strict=True)))
        whole = torch.randn(shape)
        assert torch.equal(assemble(whole, ranges, chunk), picked(whole, ranges))


def test_many_small_ranges_are_read_together() -> None:
    ranges = [[(0, 8)], [(i, i + 1) for i in range(0, 200, 2)]]
    assert len(list(boxes(ranges, 4))) == 1
