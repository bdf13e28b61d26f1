"""`nn.MultiheadAttention` by heads gives what torch's own gives, in all its options."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.modules.attention import ByHeads, split_by_heads

WIDTH, HEADS, BATCH, ASKED, HELD = 16, 4, 3, 5, 7

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "other widths": {"kdim": 12, "vdim": 20},
    "biases to keys": {"add_bias_kv": True},
    "zeros to keys": {"add_zero_attn": True},
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"need_weights": True},
    "weights of heads": {"need_weights": True, "average_attn_weights": False},
    "padding": {"key_padding_mask": True},
    "mask": {"attn_mask": "bool"},
    "mask of numbers": {"attn_mask": "float"},
    "mask of heads": {"attn_mask": "heads"},
    "mask of heads and padding": {"attn_mask": "heads", "key_padding_mask": True},
    "causal": {"attn_mask": "causal", "is_causal": True},
    "causal and padding": {"attn_mask": "causal", "is_causal": True, "key_padding_mask": True},
}


def masks(options: dict[str, Any], batch: int) -> dict[str, Any]:
    """The options of a call with masks in the place of their names."""
    out = {"need_weights": False} | options
    kind = out.get("attn_mask")
    shape = (batch * HEADS, ASKED, HELD) if kind == "heads" else (ASKED, HELD)
    if kind == "causal":
        out["attn_mask"] = torch.ones(ASKED, HELD, dtype=torch.bool).triu(1)
    elif kind is not None:
        hidden = torch.rand(shape) < 0.3
        hidden[..., 0] = False
        out["attn_mask"] = hidden if kind != "float" else torch.randn(shape, dtype=torch.float64)
    if "key_padding_mask" in out:
        padding = torch.zeros(batch, HELD, dtype=torch.bool)
        padding[0, 4:] = True
        out["key_padding_mask"] = padding
    return out


@pytest.mark.parametrize(("made", "called"), list(product(MODULES, CALLS)))
def test_equals_torch(made: str, called: str) -> None:
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(WIDTH, HEADS, **MODULES[made]).double()
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    mine = copy.deepcopy(whole)
    assert split_by_heads(mine) and isinstance(mine, ByHeads)
    widths = (WIDTH, whole.kdim, whole.vdim)
    given = [
        torch.randn(n, BATCH, w, dtype=torch.float64)
        for n, w in zip((ASKED, HELD, HELD), widths, strict=True)
    ]
    if whole.batch_first:
        given = [x.transpose(0, 1) for x in given]
    options = masks(CALLS[called], BATCH)
    same(whole(*given, **options), mine(*given, **options))
    if "of heads" not in called:
        one = [x[0] if whole.batch_first else x[:, 0] for x in given]
        options = masks(CALLS[called], 1)
        if "key_padding_mask" in options:
            options["key_padding_mask"] = options["key_padding_mask"][0]
        same(whole(*one, **options), mine(*one, **options))


def same(a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_causal_without_a_mask_is_refused_as_by_torch() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS)
    split_by_heads(module)
    x = torch.randn(ASKED, BATCH, WIDTH)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        module(x, x, x, is_causal=True, need_weights=False)
