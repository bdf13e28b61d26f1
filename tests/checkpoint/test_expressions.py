"""Parts of what torch code makes of stored tensors, against parts of what it makes of real ones."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwright.runtime.checkpoint.expressions import (
    Index,
    Recorder,
    Unexpressed,
    part,
    place,
    stored,
)

Make = Callable[..., Tensor]


def rope(x: Tensor) -> Tensor:
    return x.view(3, 4, 2, 5).transpose(1, 2).reshape(24, 5)


def deinterleaved(x: Tensor) -> Tensor:
    return x.reshape(12, 2, 5).transpose(0, 1).reshape(x.shape).contiguous()


MADE: dict[str, tuple[Make, list[tuple[int, ...]]]] = {
    "stack": (lambda *x: torch.stack(x, dim=1), [(4, 3)] * 5),
    "stack of vectors": (lambda *x: torch.stack(x), [(4,)] * 3),
    "stack of scalars": (lambda *x: torch.stack(x), [()] * 3),
    "cat": (lambda *x: torch.cat(x, dim=-1), [(2, 3), (2, 1), (2, 6)]),
    "experts": (
        lambda *x: torch.cat([torch.stack(x[:3]), torch.stack(x[3:])], dim=1),
        [(4, 5)] * 6,
    ),
    "transpose": (lambda x: x.transpose(-1, 1), [(2, 3, 4)]),
    "t": (lambda x: x.t().contiguous(), [(3, 4)]),
    "permute": (lambda x: x.permute(-1, 0, 1), [(2, 3, 4)]),
    "chunk": (lambda x: x.chunk(3, dim=1)[1], [(4, 7)]),
    "split": (lambda x: torch.split(x, [1, 4, 2], dim=1)[1], [(4, 7)]),
    "unbind": (lambda x: x.unbind(1)[2].unsqueeze(0), [(4, 7)]),
    "slices": (lambda x: x[1:-1:2, None, ..., 3], [(9, 2, 5)]),
    "squeeze": (lambda x: x[:, :1].squeeze(1), [(4, 7)]),
    "rope": (rope, [(24, 5)]),
    "rope of one column": (lambda x: rope(x[:, :5]), [(24, 6)]),
    "deinterleaved": (deinterleaved, [(24, 5)]),
    "interleaved": (lambda x: x.reshape(2, 12, 5).transpose(0, 1).reshape(24, 5), [(24, 5)]),
    "flattened": (lambda x: x.reshape(4, -1), [(4, 3, 2, 2)]),
    "folded": (lambda x: x.reshape(4, 3, 2, 2), [(4, 12)]),
    "regrouped": (lambda x: x.reshape(6, 4), [(4, 6)]),
    "regrouped twice": (lambda x: x.t().reshape(2, 9, 4).reshape(8, 9), [(4, 18)]),
    "ones": (lambda x: x.reshape(1, 4, 1, 6, 1).reshape(4, 6), [(1, 4, 6)]),
}


def picks(rng: random.Random, size: int) -> Tensor:
    """Some indices below `size`: a run, or any in any order."""
    chosen = sorted(rng.sample(range(size), rng.randint(1, size)))
    if rng.random() < 0.5:
        return torch.arange(chosen[0], chosen[-1] + 1)
    rng.shuffle(chosen)
    return torch.tensor(chosen)


def take(whole: Tensor, index: Index) -> Tensor:
    for dim, i in enumerate(index):
        whole = whole.index_select(dim, i)
    return whole


REGROUPED = {"rope", "rope of one column", "deinterleaved", "interleaved", "flattened"}
REGROUPED |= {"regrouped", "regrouped twice"}
"""Of these, random indices are no product of stored indices: more may be read."""


@pytest.mark.parametrize("name", MADE)
def test_parts(name: str) -> None:
    make, shapes = MADE[name]
    real = {str(i): torch.randn(shape) for i, shape in enumerate(shapes)}
    expected = make(*real.values())
    with Recorder() as recorder:
        made = make(*(recorder.stored(k, tuple(t.shape), t.dtype) for k, t in real.items()))
    expression = recorder.expression(made)
    assert expression.shape == expected.shape
    assert set(stored(expression)) == real.keys()
    taken = 0

    def read(key: str, index: Index) -> Tensor:
        nonlocal taken
        out = take(real[key], index)
        taken += out.numel()
        return out

    rng = random.Random(0)
    for _ in range(30):
        index = tuple(picks(rng, n) for n in expected.shape)
        taken = 0
        got = part(expression, index, read)
        assert torch.equal(got, take(expected, index))
        exact = taken == got.numel()
        assert exact or name in REGROUPED, "no more is read than is asked for"
        placed = torch.full(got.shape, torch.nan, dtype=torch.float64)
        place(expression, index, read, placed)
        assert torch.equal(placed, got.double()), "straight to its place, and cast there"
        assert not exact or taken == 2 * got.numel()


def test_what_is_not_moved_is_refused() -> None:
    def refused(make: Make, why: str) -> None:
        with pytest.raises(Unexpressed, match=why), Recorder() as recorder:
            a = recorder.stored("a", (2, 3), torch.float32)
            b = recorder.stored("b", (2, 3), torch.bfloat16)
            recorder.expression(make(a, b))

    refused(lambda a, b: a + 1, "calls aten.add.Tensor")
    refused(lambda a, b: a.flip(0), "calls aten.flip")
    refused(lambda a, b: a.zero_(), "calls aten.zero_")
    refused(lambda a, b: torch.zeros(2, 3, device="meta").copy_(a), "calls aten.copy_")
    refused(lambda a, b: a.to(torch.float64), "mixes dtypes")
    refused(lambda a, b: torch.cat([a, b]), "mixes dtypes")
    refused(lambda a, b: torch.cat([a, torch.zeros(1, 3, device="meta")]), "from somewhere else")
    refused(lambda a, b: torch.zeros(2, 3), "from somewhere else")
