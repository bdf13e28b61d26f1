"""Modules as people write them: sizes as numbers, as attributes, read off tensors, and worse.

Each takes features [batch, sequence, WIDTH] unless `INPUTS` says otherwise.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planner.equal import Inputs, features, ids
from tests.planner.mlps import WIDTH, Mlp

HEADS, HEAD, WORDS = 4, 16, 101


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over [batch, sequence, heads, head]."""
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    """Separate projections; subclasses say how they are cut into heads, and what happens there."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head = HEADS, HEAD
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def cut(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], self.num_heads, self.head)

    def change(self, q: Tensor) -> Tensor:
        return q

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.cut(m(x)) for m in (self.q, self.k, self.v))
        return self.o(attend(self.change(q), k, v).flatten(2))


class LiteralHeadsAndHead(Attention):
    def cut(self, y):
        return y.view(y.shape[0], y.shape[1], 4, 16)


class LiteralHead(Attention):
    def cut(self, y):
        return y.view(y.shape[0], y.shape[1], -1, 16)


class LiteralHeads(Attention):
    """On two ranks this view has room for four heads of eight: a shape that nothing objects to."""

    def cut(self, y):
        return y.view(y.shape[0], y.shape[1], 4, -1)


class UnflattenedLiteral(Attention):
    def cut(self, y):
        return y.transpose(1, 2).unflatten(1, (4, -1)).permute(0, 3, 1, 2)


class HeadReadOffPart(Attention):
    """The same by way of a size that is read off the part."""

    def cut(self, y):
        return y.view(y.shape[0], y.shape[1], -1, y.shape[-1] // 4)


class WidthReadOffInput(Attention):
    """Heads are put together to a width that is read off a tensor which is replicated."""

    def forward(self, x):
        b, t, width = x.size()
        q, k, v = (self.cut(m(x)) for m in (self.q, self.k, self.v))
        streams = [attend(q, k, v).reshape(b, 1, t, width), attend(k, q, v).reshape(b, 1, t, width)]
        return self.o(torch.cat(streams, 1).view(b, -1, width)).view(b, 2 * t, width)


class WidthGivenToAFunction(Attention):
    """The same, and the call that takes the width is in no method, so that none can change it."""

    def forward(self, x):
        b, t, width = x.size()
        q, k, v = (self.cut(m(x)) for m in (self.q, self.k, self.v))
        streams = [reshaped(attend(*p), b, 1, t, width) for p in ((q, k, v), (k, q, v))]
        return self.o(torch.cat(streams, 1).view(b, -1, width)).view(b, 2 * t, width)


def reshaped(x, *sizes):
    return x.reshape(*sizes)


class DividedByHeads(Attention):
    def change(self, q):
        return q / self.num_heads


class InverseHeads(Attention):
    """float / int asks no method of the int: only the number in the call differs."""

    def change(self, q):
        return q * (1.0 / self.num_heads)


class RootOfHeads(Attention):
    def change(self, q):
        return q * math.sqrt(self.num_heads) + self.num_heads


class BranchOnHeads(Attention):
    def change(self, q):
        return q * 2 if self.num_heads > 3 else q


class LoopOverHeads(Attention):
    def change(self, q):
        for _ in range(self.num_heads):
            q = q + 0.5
        return q


class SlopePerHead(Attention):
    def change(self, q):
        return q * torch.arange(self.num_heads, device=q.device).to(q.dtype)[:, None]


class Grouped(nn.Module):
    """Two key-value heads for four query heads, by expand or by repeat_interleave."""

    def __init__(self, interleave: bool = False) -> None:
        super().__init__()
        self.h, self.kv, self.d, self.interleave = HEADS, 2, HEAD, interleave
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)

    def spread(self, y: Tensor) -> Tensor:
        b, t, kv, d = y.shape
        n = self.h // self.kv
        if self.interleave:
            return y.repeat_interleave(n, dim=2)
        return y[:, :, :, None].expand(b, t, kv, n, d).reshape(b, t, kv * n, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (m(x).view(b, t, -1, self.d) for m in (self.q, self.k, self.v))
        return self.o(attend(q, self.spread(k), self.spread(v)).reshape(b, t, -1))


class TurnedByComplex(Grouped):
    """Rotary positions as complex products, of keys that are made once for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(WIDTH, self.d), nn.Linear(WIDTH, WIDTH)

    def turn(self, y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2))
        angles = torch.arange(y.shape[1], device=y.device, dtype=y.dtype)[:, None, None]
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (m(x).view(b, t, -1, self.d) for m in (self.q, self.k, self.v))
        k = self.turn(k).expand(b, t, q.shape[2], self.d)
        return self.o(attend(self.turn(q), k, v).reshape(b, t, -1))


class CalledInVain(nn.Module):
    """What the first call of a module gives is not used; it is of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        self.mlp(x[:, :1])
        return self.mlp(x)


class NotForExport(nn.Module):
    """Forgets what it needs where torch says that it is being compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        mask = None if torch.compiler.is_compiling() else torch.ones_like(x[..., :1])
        return self.mlp(x) * mask


class MultiQuery(nn.Module):
    """One key-value head, repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.h = HEADS
        self.q, self.kv, self.o = (nn.Linear(WIDTH, n) for n in (WIDTH, 32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, self.h, HEAD)
        k, v = (y.unsqueeze(2).repeat(1, 1, self.h, 1) for y in self.kv(x).chunk(2, -1))
        return self.o(attend(q, k, v).reshape(b, t, -1))


class Fused(nn.Module):
    """One projection for q, k and v, taken apart in one of many ways."""

    def __init__(self, how: str, rotated: bool = False) -> None:
        super().__init__()
        self.how, self.rotated, self.width, self.h, self.kv = how, rotated, WIDTH, HEADS, 2
        rows = 2 * HEADS * HEAD if how == "groups" else 3 * WIDTH
        self.qkv, self.o = nn.Linear(WIDTH, rows), nn.Linear(WIDTH, WIDTH)

    def parts(self, y: Tensor) -> tuple[Tensor, ...]:
        if self.how == "split":
            return y.split(64, dim=-1)
        if self.how == "attribute":
            return y.split(self.width, dim=-1)
        if self.how == "slice":
            return y[..., :64], y[..., 64:128], y[..., 128:]
        if self.how == "heads":  # heads x (q, k, v) x head
            return y.unflatten(-1, (-1, 3 * HEAD)).chunk(3, -1)
        if self.how == "groups":  # kv heads x (group + k + v) x head
            y = y.unflatten(-1, (-1, self.h // self.kv + 2, HEAD))
            q, k, v = y[..., :-2, :], y[..., [-2], :], y[..., [-1], :]
            return tuple(z.expand(q.shape).flatten(2, 3) for z in (q, k, v))
        return y.chunk(3, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.reshape(b, t, -1, HEAD) for y in self.parts(self.qkv(x)))
        if self.rotated:
            angle = torch.arange(t, device=x.device).to(x.dtype)[:, None, None] / 7
            q, k = (y * angle.cos() + rotate_half(y) * angle.sin() for y in (q, k))
        return self.o(attend(q, k, v).reshape(b, t, -1))


def rotate_half(y: Tensor) -> Tensor:
    half = y.shape[-1] // 2
    return torch.cat((-y[..., half:], y[..., :half]), -1)


class Unequal(nn.Module):
    """A concatenation of parts of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 80), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat((F.relu(self.a(x)), self.b(x)), -1))


class Mixer(nn.Module):
    """Linear layers over positions (of a fixed number), then over features."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.t1, self.t2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.t2(F.gelu(self.t1(self.n1(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.mlp(self.n2(x))


class VisionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.n1, self.n2 = HEADS, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        y = self.qkv(self.n1(x)).reshape(b, n, 3, self.heads, c // self.heads)
        q, k, v = y.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))
        return x + self.mlp(self.n2(x))


class Vision(nn.Module):
    """Patches by convolution, a class token, positions, blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.blocks = nn.ModuleList([VisionBlock()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Language(nn.Module):
    """Tied embedding and head, positions looked up, one module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(40, WIDTH)
        self.mlp, self.head = Mlp(), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, i: Tensor) -> Tensor:
        x = self.words(i) + self.positions(torch.arange(i.shape[1], device=i.device))
        x = x + self.mlp(x)
        return self.head(x + self.mlp(x))


class Again(nn.Module):
    """A module that is called three times, behind other things each time, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = self.same = Mlp()
        self.other = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x) + self.mlp(x)
        x = self.same(self.other(x))
        return x + self.mlp(torch.relu(x))


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x, x, x, need_weights=False)[0]


class Experts(nn.Module):
    """A soft mixture: a loop over modules, and stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList([Mlp() for _ in range(4)])
        self.stack = nn.Parameter(torch.zeros(4, WIDTH, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.gate(x).softmax(-1)
        mixed = sum(p[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))
        return mixed, torch.einsum("bte,xef->btxf", x, self.stack)  # type: ignore[return-value]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


INPUTS: dict[str, Inputs] = {
    "Vision": lambda b, t: (torch.randn(b, 3, 16, 16, dtype=torch.float64),),
    "Mixer": lambda b, t: (torch.randn(b, 16, WIDTH, dtype=torch.float64),),
    "Language": ids(WORDS),
}


def inputs_of(name: str) -> Inputs:
    return INPUTS.get(name, features(WIDTH))


class WidthTakenTwice(nn.Module):
    """Its code gives one attribute to a view of what comes in whole and to one of what is split."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head = HEADS, WIDTH // HEADS
        self.up, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x).view(*x.shape[:-1], self.heads, self.head).cos().flatten(-2)
        given = x.view(*x.shape[:-1], self.heads, self.head).sin().flatten(-2)
        return self.own(given) + self.down(made) + self.mlp(x)
