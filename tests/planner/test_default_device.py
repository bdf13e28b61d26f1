"""Code that makes tensors on torch's default device (`torch.arange(t)`) is traced as it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.planner.equal import Inputs, assert_equal, features, ids, planned


class Places(nn.Module):
    """Sines, slopes and a band of its own making, none of them told where the input is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.q, self.kv = nn.Embedding(48, 24), nn.Linear(24, 48), nn.Linear(24, 16)
        self.o, self.head = nn.Linear(48, 24), nn.Linear(24, 48)

    def forward(self, ids: Tensor) -> Tensor:
        (b, t), x = ids.shape, self.table(ids)
        at = torch.arange(t)
        turn = at[:, None] / 100 ** (torch.arange(0, 8, 2) / 8).double()
        q = self.q(x).reshape(b, t, 6, 8).transpose(1, 2)
        k, v = self.kv(x)[:, None].chunk(2, -1)
        even, odd = q[..., ::2], q[..., 1::2]
        q = torch.cat([even * turn.cos() - odd * turn.sin(), even * turn.sin() + odd], -1)
        scores = q @ k.mT - 0.1 * torch.arange(1, 7)[:, None, None] * (at[:, None] - at).abs()
        near = (at[:, None] >= at) & (at[:, None] - at < 4)
        weights = scores.masked_fill(~near, torch.tensor(-torch.inf)).softmax(-1)
        return self.head(x + self.o((weights @ v).transpose(1, 2).flatten(2)))


class Written(nn.Module):
    """Writes and adds what it computes into tensors of its own, and picks by a list of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x).tanh()
        into = torch.zeros(x.shape[0], x.shape[1], 48, dtype=x.dtype)
        into += h
        into[:, 1:] += F.relu(h[:, :-1])
        picked = torch.index_select(h, 1, torch.tensor([0, 1, 1]))
        summed = torch.zeros(x.shape[0], 3, 48, dtype=x.dtype)
        summed.index_add_(1, torch.arange(x.shape[1]) % 3, h)
        return self.down(into), self.down(picked), self.down(summed)


class Spectrum(nn.Module):
    """torch asks where the window is before it calls an op."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        y, window = self.down(self.up(x).tanh()).flatten(1), torch.hann_window(16).double()
        parts = torch.stft(y, 16, 4, window=window, return_complex=True)
        return torch.istft(parts * 2, 16, 4, window=window, length=y.shape[1])


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(Places, ids(48)), (Written, features(24)), (Spectrum, features(24))],
)
@pytest.mark.parametrize("tp", [2, 3])
def test_equals_the_whole_model(make: Any, inputs: Inputs, tp: int) -> None:
    module = make().double()
    plan = planned(module, inputs, tp)
    assert max(plan.predicted.parameter_bytes) < 0.6 * plan.predicted.unsharded_bytes
    assert_equal(module, inputs, plan, collectives=make is Places)
