"""Two linear layers, and what people put between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64


class Mlp(nn.Module):
    """Two linear layers; subclasses say what happens between them."""

    hidden, kept = 128, 128

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.kept
        self.up, self.down = nn.Linear(WIDTH, self.hidden), nn.Linear(self.kept, WIDTH)

    def between(self, y: Tensor) -> Tensor:
        return F.relu(y)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Gated(Mlp):
    hidden = 256


class GatedByNumbers(Gated):
    def between(self, y):
        return F.silu(y[..., :128]) * y[..., 128:]


class GatedByHalf(Gated):
    def between(self, y):
        half = y.shape[-1] // 2
        return F.silu(y[..., :half]) * y[..., half:]


class GatedByAttribute(Gated):
    def between(self, y):
        return F.silu(y[..., : self.inner]) * y[..., self.inner :]


class GatedFromTheEnd(Gated):
    def between(self, y):
        return F.silu(y[..., : -self.inner]) * y[..., -self.inner :]


class GatedBySteps(Gated):
    def between(self, y):
        return F.silu(y[..., ::2]) * y[..., 1::2]


class OneFeature(Mlp):
    def between(self, y):
        return y * y[..., 4:5] + y[..., 4].unsqueeze(-1) - y[..., -1:]


class ChosenFeatures(Mlp):
    kept = 3

    def between(self, y):
        return y[..., [3, 1, 100]]


class InPlace(Mlp):
    def between(self, y):
        y = y.clone()
        y.mul_(2)
        y[..., :3] = 0
        y += 1
        return y


class Softmax(Mlp):
    def between(self, y):
        return y.softmax(-1)


class MeanBySize(Mlp):
    def between(self, y):
        return y * (y.sum(-1, keepdim=True) / y.shape[-1])


class InverseSize(Mlp):
    def between(self, y):
        return y * (1.0 / y.shape[-1]) + y * y.size(-1) ** -0.5


class Lengths(Mlp):
    def between(self, y):
        return y * len(y[0, 0]) + y.numel() // (y.shape[0] * y.shape[1])


class OwnZeros(Mlp):
    def between(self, y):
        kept = torch.zeros(y.shape, dtype=y.dtype, device=y.device)
        kept[..., :64] = 1
        return y * kept + torch.ones_like(y)


class Shuffled(Mlp):
    def between(self, y):
        b, t, c = y.shape
        return y.view(b, t, 2, c // 2).transpose(2, 3).reshape(b, t, c)
