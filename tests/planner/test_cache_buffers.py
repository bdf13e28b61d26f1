"""Caches in buffers, into parts of which code writes: ranks keep those of their own heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.runtime.api import apply
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.ranks import run_ranks

WIDTH, HEADS, SIZE = 24, 4, 6


class Attention(nn.Module):
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("cache", torch.zeros(5, HEADS, 64, SIZE))

    def write(self, k: Tensor, at: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k))
        k = self.write(k.detach(), at)
        y = F.scaled_dot_product_attention(q, k, k, mask)
        return self.o(y.transpose(1, 2).flatten(2))


class ByIndex(Attention):
    def write(self, k: Tensor, at: Tensor) -> Tensor:
        self.cache[: k.shape[0], :, at] = k
        return self.cache[: k.shape[0]]


class ByCopy(Attention):
    def write(self, k: Tensor, at: Tensor) -> Tensor:
        part = self.cache[: k.shape[0]]
        part.index_copy_(2, at, k)
        return part


class ByScatter(Attention):
    def write(self, k: Tensor, at: Tensor) -> Tensor:
        part = self.cache.narrow(0, 0, k.shape[0])
        return part.scatter_(2, at[:, None].expand_as(k), k)


class Rolled(Attention):
    """What is oldest leaves; the newest is last."""

    def write(self, k: Tensor, at: Tensor) -> Tensor:
        part = self.cache[: k.shape[0]]
        part.copy_(torch.cat([part, k], 2)[:, :, -64:].clone())
        return part


def step(batch: int, start: int, length: int) -> tuple[Tensor, ...]:
    at = torch.arange(start, start + length)
    x = torch.randn(batch, length, WIDTH, dtype=torch.float64)
    return x, at, torch.arange(64)[None, :] <= at[:, None]


@pytest.mark.parametrize("kind", [ByIndex, ByCopy, ByScatter, Rolled])
def test_a_cache_is_split_as_its_heads(kind: type[Attention]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    plan = planning.plan(copy.deepcopy(model), tp=2, args=step(3, 0, 19))
    assert plan.modules[""].parameters["cache"].placement == "5, 4@tp, 64, 6"
    steps = [step(2, 0, 7), step(2, 7, 1), step(2, 8, 3)]

    def use(local: Any) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for i, each in enumerate(steps):
            y = out[str(i)] = local(*each)
            y.square().sum().backward()
        grads = {name: p.grad for name, p in local.named_parameters() if p.grad is not None}
        return {**out, **full_tensors(local, {**grads, "cache": local.cache})}

    want = use(copy.deepcopy(model))
    assert {"q.weight", "o.bias", "cache"} < want.keys()
    for found in run_ranks(2, lambda mesh: use(apply(copy.deepcopy(model), plan, mesh))):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)
