"""Fake tensors on meta are as torch's own `FakeTensorMode` has them, the first time and again."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from shardwright.planner.trace.record.fake_mode import OnMeta

CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "promotes": lambda x, n: x * n,
    "by default dtype": lambda x, n: n / 2,
    "number": lambda x, n: (n + 1, n + 1.0, n + True),
    "broadcast": lambda x, n: x + x[:, :1].expand(3, 4, 5).transpose(0, 1).sum(0),
    "keeps strides": lambda x, n: x.transpose(1, 2) * 2,
    "view": lambda x, n: x.view(3, 2, 10),
    "slice": lambda x, n: x[..., 1:4:2],
    "views of a part": lambda x, n: (
        x[1:, 2].t(),
        x[2:, 2].t(),
        x[1:].unsqueeze(1).expand(2, 3, 4, 5).permute(3, 0, 1, 2).detach(),
    ),
    "several": lambda x, n: x.split([1, 3], 1),
    "several new": lambda x, n: x.max(dim=1),
    "cast": lambda x, n: x.transpose(0, 1).to(torch.float16),
    "cat": lambda x, n: torch.cat([x, x], -1),
    "reduced": lambda x, n: x.mean((0, 2), keepdim=True),
    "linear": lambda x, n: functional.linear(x, x[0]),
    "attention": lambda x, n: functional.scaled_dot_product_attention(x, x, x),
    "made on meta": lambda x, n: torch.arange(7, device="meta"),
    "made elsewhere": lambda x, n: torch.arange(7),
    "like": lambda x, n: torch.empty_like(x.transpose(0, 1)),
    "in place": lambda x, n: x.clone().add_(1).transpose_(0, 1),
    "selected": lambda x, n: x[:, n[0]],
    "selected twice": lambda x, n: x.transpose(0, 2)[n[:, :1], :, n[0]],
    "selected by truths": lambda x, n: x[n[:, 0] > 0],
    "copied into": lambda x, n: x.transpose(0, 1).copy_(n[:, 0, None]),
    "copied": lambda x, n: torch.ops.aten.copy(x.transpose(0, 1), n[:, 0, None]),
    "copied what does not fit": lambda x, n: x.copy_(n),
    "written to a slice": lambda x, n: torch.slice_scatter(x.mT, x[..., 0, None], 2, 1, 2),
    "put": lambda x, n: (
        x.transpose(0, 1)[n[0]].index_put((n[0],), x[0, 0]),
        x.mT.index_put_((n[0],), x[0, 0, 0]),
    ),
    "put by truths": lambda x, n: x.masked_fill_(n[:, :1, None] > 0, 0)[n[0]].index_put_(
        (n > 0,), x[0, 0, 0]
    ),
    "nothing dropped": lambda x, n: functional.dropout(x, 0.5, training=False),
    "sparse": lambda x, n: x.to_sparse(),
    "wrong": lambda x, n: x.view(7),
    "needs data": lambda x, n: x.nonzero(),
    "number of data": lambda x, n: int(n[0, 0]),
}


def said(mode: FakeTensorMode, call: Callable[[Tensor, Tensor], object]) -> list[object]:
    """What a call gives of fake tensors, and whether in the memory of what it was given."""
    given = [
        torch.empty(3, 4, 5, device="meta"),
        torch.empty(3, 2, device="meta", dtype=torch.int64),
    ]
    x, n = (FakeTensor(mode, t, t.device) for t in given)
    try:
        with torch.no_grad(), mode:
            found = tree_leaves(call(x, n))
    except Exception as error:
        return [type(error), str(error)]
    out: list[object] = []
    for t in found:
        assert isinstance(t, FakeTensor) and t.fake_mode is mode
        out += [t.shape, t.dtype, t.device, t.layout, t is x]
        if t.layout == torch.strided:
            shares = t.untyped_storage()._cdata == x.untyped_storage()._cdata
            out += [t.stride(), t.storage_offset(), shares]
    return out


@pytest.mark.parametrize("name", CALLS)
def test_as_torch_has_it(name: str) -> None:
    """Sizes, strides, dtype, device and memory, or the error: else a plan would be for others."""
    want = said(FakeTensorMode(allow_non_fake_inputs=True), CALLS[name])
    mode = OnMeta()
    assert [said(mode, CALLS[name]) for _ in range(2)] == [want, want]


def test_default_dtype() -> None:
    """What is kept is not handed out under another default dtype."""
    mode = OnMeta()
    before = said(mode, CALLS["by default dtype"])
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.float64 in said(mode, CALLS["by default dtype"]) and torch.float32 in before
    finally:
        torch.set_default_dtype(torch.float32)
