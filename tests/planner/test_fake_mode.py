"""Fake tensors on meta are as torch's own `FakeTensorMode` has them, the first time and again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.planner.trace.record import fake_mode
from shardwright.planner.trace.record.fake_mode import LikeReal, OnMeta
from shardwright.planner.trace.trial import kept_results

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


class Kept(TorchFunctionMode):
    """Keeps results of functions, as a dry run does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return kept_results.call(func, args, kwargs or {})


@pytest.mark.parametrize("name", CALLS)
def test_kept_results(name: str) -> None:
    """A kept result is the same, and in the memory of the argument if the first was."""
    want = said(OnMeta(), CALLS[name])
    with Kept():
        assert [said(OnMeta(), CALLS[name]) for _ in range(2)] == [want, want]


def test_results_that_are_not_kept() -> None:
    """Results with gradients or values are computed; a view starts where its base starts."""
    mode = OnMeta()
    x = mode.fake(torch.empty(2, 8, device="meta"), requires_grad=True)
    with mode, Kept():
        with torch.no_grad():
            assert [(x * 2).requires_grad for _ in range(2)] == [False, False]
        assert (x * 2).requires_grad and (x * 2).grad_fn is not None
        with torch.no_grad():
            starts = [part.view(4, 2).storage_offset() for part in (x[1:], x[:1])]
            assert starts == [8, 0]
            assert x.float() is x and x.float() is x
            assert functional.relu(x, inplace=True) is x
            assert functional.relu(x, inplace=True) is x
    seen = LikeReal()
    with seen, Kept(), torch.no_grad():
        n = torch.arange(3, device="meta")
        unknown = torch.empty(3, dtype=torch.int64, device="meta")
        values = [seen.known.value(x + 1) for x in (unknown, unknown, n, n)]
        assert [v is not None and v.tolist() for v in values] == [False, False, *[[1, 2, 3]] * 2]
        assert seen.known.value(unknown + n) is None


class Recording(int):
    """A number whose reads matter."""

    def __hash__(self) -> int:
        raise AssertionError("it is read")


def test_kept_results_read_no_number() -> None:
    """A number of another class than int is not compared with those of earlier calls."""
    mode = OnMeta()
    x = mode.fake(torch.empty(2, 8, device="meta"))
    with mode, Kept(), torch.no_grad():
        assert [(x * Recording(3)).shape for _ in range(2)] == [x.shape, x.shape]


def test_default_dtype() -> None:
    """What is kept is not handed out under another default dtype."""
    mode = OnMeta()
    before = said(mode, CALLS["by default dtype"])
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.float64 in said(mode, CALLS["by default dtype"]) and torch.float32 in before
    finally:
        torch.set_default_dtype(torch.float32)


def test_of_many_kept_results_the_last_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may plan one model after the other."""
    monkeypatch.setattr(fake_mode, "MAX_CACHED_RESULTS", 3)
    monkeypatch.setattr(fake_mode, "_kept", kept := {})
    with OnMeta():
        for length in range(1, 9):
            torch.empty(length, device="meta").sigmoid()
            assert 0 < len(kept) <= 3
            assert any(shape == (length,) for shape, *_ in kept.values())
