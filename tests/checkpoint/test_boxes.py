"""The boxes of reads cover what a rank holds once and stay small."""

import random

import pytest
import torch

from shardwright.planner.contract.dims import Range
from shardwright.runtime.checkpoint.reader import box_bytes, boxes, get, inside


def assemble(
    whole: torch.Tensor, ranges: list[list[Range]], chunk: int
) -> tuple[torch.Tensor, int]:
    """What the boxes give, NaN where they give nothing, and the bytes that they read."""
    shape = [sum(b - a for a, b in dim) for dim in ranges]
    out = torch.full(shape, torch.nan)
    read = 0
    for box in boxes(ranges, whole.element_size(), chunk):
        assert box_bytes(box, 4) <= max(chunk, 4 * max(1, *(s.stop - s.start for s in box)))
        assert out[inside(box)].isnan().all(), "read twice"
        out[inside(box)] = get(whole, box)
        read += box_bytes(box, 4)
    return out, read


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
        got, _ = assemble(whole, ranges, chunk)
        assert torch.equal(got, picked(whole, ranges))


def test_few_ranges_read_no_more_than_they_hold() -> None:
    ranges = [[(2, 5), (10, 30)], [(0, 4), (8, 12)]]
    got, read = assemble(torch.randn(40, 16), ranges, 100)
    assert read == got.nbytes


def test_many_small_ranges_are_read_around() -> None:
    ranges = [[(0, 8)], [(i, i + 1) for i in range(0, 200, 2)]]
    list_of = list(boxes(ranges, 4))
    assert len(list_of) == 1
    assert box_bytes(list_of[0], 4) == 8 * 199 * 4


def test_many_large_ranges_are_read_alone() -> None:
    ranges = [[(i, i + 1) for i in range(0, 80, 2)], [(0, 2**16)]]
    assert sum(box_bytes(b, 4) for b in boxes(ranges, 4)) == 40 * 2**18


def test_scalar_and_empty() -> None:
    assert list(boxes([], 4)) == [()]
    assert list(boxes([[], [(0, 3)]], 4)) == []
