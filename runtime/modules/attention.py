"""Reimplements `nn.MultiheadAttention` so that it can be sharded by heads, with the same results.

Torch's own code reads the weights of the output projection without calling that module, and uses
the number and width of all heads. The code here reads sizes off tensors, and calls the projection's
forward. Torch's code still runs in rare cases: if attention weights are returned, keys and values
have other widths, biases or zeros are appended to keys, or tensors are nested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def attend(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `nn.MultiheadAttention.forward`, with the same shapes and options."""
    plain = self._qkv_same_embed_dim and self.bias_k is None and self.bias_v is None
    if need_weights or not plain or self.add_zero_attn or query.is_nested:
        rest = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        return nn.MultiheadAttention.forward(self, query, key, value, *rest)
    mask, is_causal = _mask(query, key_padding_mask, attn_mask, is_causal)
    alone, last = query.dim() == 2, not self.batch_first
    weights = self.in_proj_weight.chunk(3)
    biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
    heads = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        x = x.unsqueeze(0) if alone else x.transpose(0, 1) if last else x
        y = F.linear(x, weight, bias).unflatten(-1, (-1, self.head_dim))
        heads.append(y.transpose(1, 2))
    if mask is not None and mask.dim() == 3 and mask.shape[0] != 1:
        mask = mask.unflatten(0, (heads[0].shape[0], -1))
    dropout = self.dropout if self.training else 0.0
    q, k, v = heads
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    # As in torch, this calls the forward, not the module: hooks on the projection do not run.
    out = self.out_proj.forward(out.transpose(1, 2).flatten(2))
    return (out.squeeze(0) if alone else out.transpose(0, 1) if last else out), None


def _mask(
    query: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, bool]:
    """The mask to add to scores, and whether they are causal without it, by torch's rules."""
    if is_causal and mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    padding = F._canonical_mask(
        padding, "key_padding_mask", F._none_or_dtype(mask), "attn_mask", query.dtype
    )
    if is_causal and padding is None:
        return None, True
    mask = F._canonical_mask(mask, "attn_mask", None, "", query.dtype, check_other=False)
    if padding is None:
        return mask, is_causal
    padding = padding.view(-1, 1, 1, padding.shape[-1])
    if mask is not None and mask.dim() == 3 and mask.shape[0] != 1:
        mask = mask.unflatten(0, (padding.shape[0], -1))
    return padding if mask is None else padding + mask, False


class ByHeads:
    """Mixin in front of `nn.MultiheadAttention`."""

    forward = attend


@cache
def _by_heads(original: type) -> type:
    members: dict[str, Any] = {"__doc__": original.__doc__, "__module__": original.__module__}
    return type(original.__name__, (ByHeads, original), members)


def split_by_heads(root: nn.Module) -> list[tuple[nn.Module, type]]:
    """Let torch's attention modules in `root` compute by heads; returns their former classes."""
    found = []
    for module in root.modules():
        original = type(module)
        if getattr(original, "forward", None) is nn.MultiheadAttention.forward:
            found.append((module, original))
            module.__class__ = _by_heads(original)
    return found


@contextmanager
def by_heads(root: nn.Module) -> Iterator[None]:
    """Inside, torch's attention modules in `root` compute by heads."""
    found = split_by_heads(root)
    try:
        yield
    finally:
        for module, original in found:
            module.__class__ = original
